"""Save and load a training as a checkpoint, on any number of ranks."""

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, cast

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zsim_torch.checkpoint import checkpoint_folder
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.checkpoint.parameter_part import need_parts
from zsim_torch.checkpoint.rank_state import RankState, derivations, need_savable
from zsim_torch.checkpoint.safe_load import UnsafeError, load_value
from zsim_torch.checkpoint.saved_groups import SavedGroup, matched, saved_groups
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.optimizer_groups import RateGroups
from zsim_torch.module.expert_parts import ExpertParts
from zsim_torch.module.generator_state import RandomState

STEP: Final = "step"
"""The host scalar with the number of updates."""

BESIDE: Final = "beside."
"""Prefix of the keys saved with the training."""

MOST_ELEMENTS: Final = 2**20
"""Maximum elements of other tensors than parameters, moments and buffers; generators have 5,056."""


class Stateful(Protocol):
    """An object that is saved along with the training, such as a scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load the state."""
        ...


class ReadPlan(NamedTuple):
    """Tensors to read from a checkpoint, and its other values, which are already read and checked.

    Attributes:
        numbers: values by key.
        groups: the saved group for each optimizer group; empty if it keeps its own rates.
        beside: objects, each with the state to load into it.
    """

    folder: Path
    metadata: Metadata
    tensors: dict[str, Any]
    numbers: Mapping[str, Any]
    groups: Sequence[SavedGroup]
    beside: Sequence[tuple[Stateful, dict[str, Any]]]
    parameters_only: bool


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """Saves and loads `state` and the host scalars on this rank."""

    state: RankState
    groups: RateGroups
    executor: Executor

    @classmethod
    def of(
        cls,
        executor: Executor,
        module: nn.Module,
        groups: RateGroups,
        *,
        owners: Mapping[str, int],
        experts: ExpertParts | None = None,
    ) -> Self:
        """Return an object that saves and loads a training, which `executor` runs.

        `owners` maps a buffer to the rank whose values count; the default is rank 0. `experts` are
        the parts of ranks that hold different ones.

        Raises:
            RefusedError: a step passes other state on to the next step, or the module cannot locate
                a tensor parallel rank's parts of matrices.
        """
        need_savable(executor.machine.program)
        need_parts(executor.machine.schedule, module)
        return cls(RankState(executor.machine, module, groups, owners, experts), groups, executor)

    @property
    def scalars(self) -> dict[str, float]:
        """Return the host scalars."""
        return self.executor.scalars

    def state_dict(self, steps_done: int, beside: Mapping[str, Stateful]) -> dict[str, Any]:
        """Return the state of a checkpoint; distributed tensors share memory with the training."""
        rank, ranks = _rank_of_ranks()
        random = RandomState.now()
        own = (
            {"cpu": random.cpu} if random.cuda is None else {"cpu": random.cpu, "cuda": random.cuda}
        )
        return {
            "model": self.state.model(rank),
            "optim": self.state.optimizer(self.scalars.get(STEP, steps_done)),
            "trainer": {"steps_done": steps_done, "ranks": ranks, "scalars": dict(self.scalars)},
            "generator": {str(rank): own},
            "beside": {name: _packed(each.state_dict()) for name, each in beside.items()},
        }

    def save(self, folder: Path, steps_done: int, beside: Mapping[str, Stateful]) -> None:
        """Write the state as the checkpoint in `folder`; every rank calls it.

        Raises:
            CheckpointError: it cannot be written; the folder is unchanged.
        """
        checkpoint_folder.write(folder, self.state_dict(steps_done, beside))

    def plan(
        self,
        folder: Path,
        beside: Mapping[str, Stateful],
        *,
        parameters_only: bool,
        keep_groups: bool,
    ) -> ReadPlan:
        """Return the plan for reading a checkpoint; nothing is changed.

        Raises:
            CheckpointError: it is of another model or optimizer, or a value is missing.
        """
        metadata = checkpoint_folder.metadata_of(folder)
        wanted = self.state.wanted(metadata, folder, parameters_only=parameters_only)
        numbers = {} if parameters_only else self._numbers(metadata, folder, wanted.prefix)
        for name in beside:
            if BESIDE + name not in metadata.state_dict_metadata:
                raise CheckpointError(f"checkpoint {folder}: it has no {name}")
            numbers[BESIDE + name] = None
        if not parameters_only:
            _warn_of_left_out(folder, metadata, beside)
        if numbers:
            checkpoint_folder.read_alone(folder, metadata, numbers)
        states = [
            (each, _unpacked(folder, name, numbers[BESIDE + name])) for name, each in beside.items()
        ]
        saved = saved_groups(numbers, f"{wanted.prefix}optim.param_groups.")
        own = self.state.groups_with_names()
        follows = bool(saved) and not keep_groups
        groups = matched(folder, saved, own, self.groups.constants) if follows else []
        return ReadPlan(folder, metadata, wanted.tensors, numbers, groups, states, parameters_only)

    def read(self, plan: ReadPlan) -> int:
        """Load a checkpoint and return its number of steps; every rank calls it.

        Raises:
            CheckpointError: it cannot be read; the training may be partly overwritten.
        """
        checkpoint_folder.read(plan.folder, plan.metadata, plan.tensors)
        self.state.spread()
        self.executor.run_again(derivations(self.executor.machine.program))
        for each, state in plan.beside:
            each.load_state_dict(state)
        return 0 if plan.parameters_only else self._take(plan.numbers, plan.groups)

    def _numbers(self, metadata: Metadata, folder: Path, prefix: str) -> dict[str, Any]:
        """Return placeholders for the other values to read, by key.

        Raises:
            CheckpointError: a tensor is too large.
        """
        rank, _ = _rank_of_ranks()
        there = metadata.state_dict_metadata
        kept = ("trainer.", f"generator.{rank}.", f"{prefix}optim.param_groups.")
        found: dict[str, Any] = {key: None for key in there if key.startswith(kept)}
        for key, each in there.items():
            if key in found and isinstance(each, TensorStorageMetadata):
                if each.size.numel() > MOST_ELEMENTS:
                    raise CheckpointError(
                        f"checkpoint {folder}: {key} has {each.size.numel()} elements; at most "
                        f"{MOST_ELEMENTS} are read"
                    )
                found[key] = torch.empty(each.size, dtype=each.properties.dtype)
        name = next(iter(self.state.parameters()))
        if f"{prefix}optim.state.{name}.step" in there:
            found[f"{prefix}optim.state.{name}.step"] = torch.zeros(())
        return found

    def _take(self, found: Mapping[str, Any], groups: Sequence[SavedGroup]) -> int:
        """Set host scalars, optimizer rates and generators to the values in `found`."""
        rank, ranks = _rank_of_ranks()
        updates = next((each for key, each in found.items() if key.endswith(".step")), 0)
        if STEP in self.scalars:
            self.scalars[STEP] = float(updates)
        for name in self.scalars:
            self.scalars[name] = found.get(f"trainer.scalars.{name}", self.scalars[name])
        for number, group in enumerate(groups):
            for name, each in group.items():
                self.groups.restore(number, name, each)
        if found.get("trainer.ranks") == ranks and f"generator.{rank}.cpu" in found:
            RandomState(found[f"generator.{rank}.cpu"], found.get(f"generator.{rank}.cuda")).set()
        return int(found.get("trainer.steps_done", updates))


def _packed(state: dict[str, Any]) -> bytes:
    """Return a state of any content as one value of a checkpoint."""
    packed = io.BytesIO()
    torch.save(state, packed)
    return packed.getvalue()


def _warn_of_left_out(folder: Path, metadata: Metadata, beside: Mapping[str, Stateful]) -> None:
    """Warn about states in a checkpoint that are not loaded: a scheduler would start anew."""
    for key in metadata.state_dict_metadata:
        name = key.removeprefix(BESIDE)
        if name != key and name not in beside:
            message = f"checkpoint {folder}: it has {name}, which is not loaded; give it to load"
            warnings.warn(message, stacklevel=4)


def _unpacked(folder: Path, name: str, packed: object) -> dict[str, Any]:
    """Return the state that `_packed` has packed.

    Raises:
        CheckpointError: it is not a state, or refers to code.
    """
    try:
        found: object = load_value(io.BytesIO(cast("bytes", packed)), name)
    except UnsafeError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    except Exception as error:  # a broken value may raise anything
        raise CheckpointError(f"checkpoint {folder}: {name} cannot be read") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"checkpoint {folder}: {name} is no state: it must be a dict")
    return cast("dict[str, Any]", found)


def _rank_of_ranks() -> tuple[int, int]:
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
