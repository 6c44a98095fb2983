"""State of a training between steps, under the names of FSDP2's checkpoints.

`model.NAME` is a parameter, from its master if it has one, or a buffer of the module;
`optim.state.NAME.exp_avg` a moment, and `optim.state.NAME.step` its number of updates;
`optim.param_groups` the constants of the optimizer. `trainer` and `generator` are specific to zsim:
host scalars, finished steps, and the states of torch's generators by rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zsim.backend.backend import RefusedError
from zsim.schedule.access import accesses
from zsim.schedule.layout import Fragment
from zsim.schedule.operation import (
    Action,
    AllGather,
    Compute,
    Copy,
    Fill,
    Operation,
    Role,
    StreamOperation,
    View,
    walk,
)
from zsim.schedule.schedule import Buffer, Kind, Program
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.checkpoint.held_tensor import HeldBox, HeldTensor
from zsim_torch.checkpoint.parameter_part import ParameterPart
from zsim_torch.execute.executor import RankMachine
from zsim_torch.execute.first_nan import STATE
from zsim_torch.execute.full_parameters import StateMemory, holders, own_part, persistent, spread
from zsim_torch.execute.optimizer_groups import RateGroups, moment_names
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.expert_parts import ExpertParts
from zsim_torch.module.visit import views_of

PREFIXES: Final = ("", "app.")
"""Prefixes before `model.` in a checkpoint: none, or the one in torch's tutorial."""


@dataclass(slots=True)
class RankState:
    """Parameters, moments, host scalars and optimizer constants of a training on one rank.

    `owners` maps a buffer of the module to the rank whose values count; the default is rank 0.
    """

    machine: RankMachine
    module: nn.Module
    groups: RateGroups
    owners: Mapping[str, int]
    experts: ExpertParts | None = None
    memory: StateMemory = field(init=False)
    _names: dict[int, str] = field(init=False)
    _parts: dict[str, ParameterPart] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = StateMemory(self.machine.memory)
        named = list(self.module.named_parameters())
        self._names = {id(parameter): name for name, parameter in named}
        self._parts = {
            name: ParameterPart.of(self.module, name, each.shape, self.experts)
            for name, each in named
        }

    def parameters(self) -> dict[str, HeldTensor]:
        """Return the boxes of each parameter that this rank holds.

        A rank holds no boxes of other pipeline stages' parameters.
        """
        return self._held(lambda program: holders(self.machine, program))

    def model(self, rank: int) -> dict[str, torch.Tensor]:
        """Return parameters under all of their names, and the buffers that `rank` owns.

        The values of a buffer may differ between ranks.
        """
        held = self.parameters()
        found: dict[str, torch.Tensor] = {
            name: held[self._names[id(parameter)]]
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        own = {
            name: each for name, each in self.buffers().items() if self.owners.get(name, 0) == rank
        }
        return found | own

    def moments(self) -> dict[str, dict[str, HeldTensor]]:
        """Return the boxes of each moment that this rank holds, by parameter and torch's name."""
        found: dict[str, dict[str, HeldTensor]] = {name: {} for name in self._parts}
        numbers = {
            program.role: _moment_numbers(program) for program in self.machine.schedule.programs
        }
        for which, moment in enumerate(self._moment_names()):

            def of(program: Program, which: int = which) -> list[Buffer]:
                every = persistent(self.machine, Kind.MOMENT, program=program)
                return [each for each in every if numbers[program.role][each.name] == which]

            for name, held in self._held(of).items():
                found[name][moment] = held
        return found

    def _moment_names(self) -> tuple[str, ...]:
        """Return torch's names of moments; all pipeline stages use one kind of rule."""
        every = map(moment_names, self.machine.schedule.programs)
        return max(every, key=len)

    def _held(self, buffers_of: Callable[[Program], Iterable[Buffer]]) -> dict[str, HeldTensor]:
        """Return the boxes that this rank holds in buffers, for the parameters of all roles."""
        layouts = self.machine.schedule.layout_by_name
        dtypes = {
            piece.parameter: TORCH_DTYPE[buffer.dtype]
            for program in self.machine.schedule.programs
            for buffer in buffers_of(program)
            for piece in layouts[buffer.layout or ""].pieces
        }
        found: dict[str, list[HeldBox]] = {name: [] for name in dtypes}
        for buffer in buffers_of(self.machine.program):
            own = own_part(self.machine, buffer)
            for fragment in own.fragments:
                found[fragment.parameter] += self._boxes(fragment, buffer.name, own.start)
        return {
            name: HeldTensor.of(self._parts[name].whole, dtypes[name], held, self.memory.flat)
            for name in self._parts
            if (held := found.get(name)) is not None
        }

    def _boxes(self, fragment: Fragment, buffer: str, start: int) -> Iterator[HeldBox]:
        for box in self._parts[fragment.parameter].boxes(fragment.offset, fragment.size):
            yield HeldBox(box, buffer, start + fragment.position + box.start)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers of the module."""
        known = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in known}

    def optimizer(self, step: float) -> dict[str, Any]:
        """Return moments and constants in the layout of FSDP2's checkpoints."""
        steps = torch.tensor(float(step))
        state = {name: {**found, "step": steps} for name, found in self.moments().items()}
        return {"state": state, "param_groups": self.groups_with_names()}

    def groups_with_names(self) -> list[dict[str, Any]]:
        """Return rates, constants and parameter names of each optimizer group."""
        return self.groups.saved_groups(self._names)

    def wanted(self, metadata: Metadata, folder: Path, *, parameters_only: bool) -> "Wanted":
        """Return the tensors to read from a checkpoint, by their names there.

        Raises:
            CheckpointError: it is of another model, or has no optimizer state.
        """
        there = metadata.state_dict_metadata
        first = next(iter(self._parts))
        known = [each for each in PREFIXES if f"{each}model.{first}" in there]
        prefix = known[0] if known else ""
        parameters = self.parameters()
        start = f"{prefix}model."
        model = {key.removeprefix(start): there[key] for key in there if key.startswith(start)}
        _need_same_model(folder, model, parameters, {**self.model(0), **self.buffers()}.keys())
        tensors: dict[str, torch.Tensor] = {
            f"{prefix}model.{name}": held for name, held in parameters.items()
        }
        if not parameters_only:
            state = f"{prefix}optim.state."
            for name, found in self.moments().items():
                for moment, held in found.items():
                    tensors[f"{state}{name}.{moment}"] = held
            if missing := [key for key in tensors if key not in there]:
                raise CheckpointError(
                    f"checkpoint {folder}: it has no {missing[0]}; parameters_only = True "
                    "begins the optimizer anew"
                )
        for name, buffer in self.buffers().items():
            _need_shape(folder, f"buffer {name}", model.get(name), buffer)
            tensors[f"{prefix}model.{name}"] = buffer
        return Wanted(prefix, {key: each for key, each in tensors.items() if key in there})

    def spread(self) -> None:
        """Copy the values that all ranks have read to every buffer of this rank."""
        spread(self.machine, self.memory)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Tensors to read, by their keys in a checkpoint, and the prefix of these keys."""

    prefix: str
    tensors: dict[str, torch.Tensor]


def _need_same_model(
    folder: Path,
    there: Mapping[str, object],
    parameters: Mapping[str, torch.Tensor],
    known: Set[str],
) -> None:
    """Raise CheckpointError unless a checkpoint has exactly the trained parameters."""
    for name, held in parameters.items():
        found = there.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(
                f"checkpoint {folder}: it is of another model: it has no parameter {name}"
            )
        _need_shape(folder, f"parameter {name}", found, held)
    if others := sorted(there.keys() - known):
        raise CheckpointError(
            f"checkpoint {folder}: it is of another model: it has {others[0]}, the module has not"
        )


def _need_shape(folder: Path, what: str, there: object, here: torch.Tensor) -> None:
    """Raise CheckpointError if a stored tensor has another shape than the module's."""
    if isinstance(there, TensorStorageMetadata) and there.size != here.shape:
        raise CheckpointError(
            f"checkpoint {folder}: it is of another model: {what} is {extents(there.size)} there, "
            f"{extents(here.shape)} here"
        )


def extents(shape: Sequence[int]) -> str:
    """Return a shape as text."""
    return " x ".join(map(str, shape)) or "a number"


def _moment_numbers(program: Program) -> dict[str, int]:
    """Return the moment's number for each buffer, including buffers that are copied from for it."""
    found: dict[str, int] = {}
    for operation in walk(program.step):
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            for number, view in enumerate(views_of(operation, Role.MOMENT)):
                found[view.buffer] = number
    for operation in walk(program.step):
        if isinstance(operation, Copy) and operation.target.buffer in found:
            found.setdefault(operation.source.buffer, found[operation.target.buffer])
    return found


def derivations(program: Program) -> list[Operation]:
    """Return the setup operations that copy or gather state to other persistent buffers."""
    state = {name for name in program.persistent if program.by_name[name].kind in STATE}
    others = set(program.persistent) - state
    return [
        operation
        for operation in program.setup
        if isinstance(operation, AllGather | Copy)
        and operation.source.buffer in state
        and operation.target.buffer in others
    ]


def _filled_again(program: Program) -> set[str]:
    """Return the buffers that each step leaves as setup does, such as loads of experts."""
    last: dict[str, Operation] = {}
    for operation in walk(program.step):
        if isinstance(operation, StreamOperation):
            last |= {view.buffer: operation for view in written(operation)}
    always = {id(operation) for operation in program.step}
    return {
        each.target.buffer
        for each in program.setup
        if isinstance(each, Fill) and each.scalar is None
        if isinstance(end := last.get(each.target.buffer), Fill) and id(end) in always
        if (end.target, end.value, end.scalar) == (each.target, each.value, None)
    }


def need_savable(program: Program) -> None:
    """Raise RefusedError unless a step of `program` depends only on state and host scalars.

    A step must not read other data that the step before has left in memory.
    """
    kept = {
        name
        for name in program.persistent
        if program.by_name[name].kind not in STATE or program.by_name[name].layout is None
    }
    kept -= {view.buffer for each in derivations(program) for view in written(each)}
    kept -= _filled_again(program)
    for operation in walk(program.step):
        if not isinstance(operation, StreamOperation):
            continue
        touched = [access for access in accesses(operation) if access.view.buffer in kept]
        for access in touched:
            if access.reads:
                raise RefusedError(
                    f"checkpoint: {operation.id} reads {access.view.buffer}, which a step leaves "
                    "to the next and no checkpoint has"
                )
        kept -= {access.view.buffer for access in touched}


def written(operation: Operation) -> Iterator[View]:
    """Yield the views that an operation writes."""
    if isinstance(operation, StreamOperation):
        yield from (access.view for access in accesses(operation) if access.writes)
