"""The units of a user's module: parts that are gathered, run and differentiated as one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from zsim_torch.module.compiled import is_compiled


class SegmentChoice(NamedTuple):
    """A segment of a unit, and the module that runs it, with parameters of the whole module."""

    unit: str
    segment: int
    module: nn.Module


UnitChoice = str | tuple[str, nn.Module] | SegmentChoice
"""Path of a submodule, a name and a module with parameters of the whole module, or a segment."""

SegmentKey = tuple[str, int]
"""The name of a unit, and the number of its segment."""


class ModuleUnitError(ValueError):
    """Units that do not make up the module; the message names the unit or parameter."""


class UnitRunError(RuntimeError):
    """A unit does something that its schedule does not support; the message names the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchUnit:
    """One unit: its module, and its parameters in the order of the module.

    `names` are the parameters' names in the whole module, `local_names` those in the unit's;
    `frozen` are names of untrained ones. The unit is called with the inputs of its segment in
    order, and returns the segment's outputs. A unit that is cut into segments becomes several of
    these, one for each `segment`.
    """

    name: str
    module: nn.Module
    names: tuple[str, ...]
    local_names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    frozen: frozenset[str] = frozenset()
    segment: int = 0
    is_compiled: bool = False
    _slots: list[tuple[int, dict[str, torch.Tensor], str]] = field(
        default_factory=list[tuple[int, dict[str, torch.Tensor], str]], compare=False, repr=False
    )
    """Number, table and key for each slot of a parameter in the module; set by the first call."""

    @property
    def key(self) -> SegmentKey:
        """Return the key by which an operation refers to the unit."""
        return self.name, self.segment

    def run(self, parameters: Sequence[torch.Tensor], inputs: Sequence[object]) -> object:
        """Return the unit's outputs for `inputs`, with `parameters` in place of its own."""
        return self.call(parameters, tuple(inputs), {})

    def call(
        self,
        parameters: Sequence[torch.Tensor],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Call the module with `parameters`, in its order, in place of its own.

        `torch.func.functional_call` does the same, but looks up the parameters in each call, which
        takes longer than a small layer.
        """
        if self.names and not self._slots:
            self._slots.extend(_slots_of(self.module, self.local_names))
        kept = [table[key] for _, table, key in self._slots]
        try:
            for place, table, key in self._slots:
                table[key] = parameters[place]
            return self.module(*args, **kwargs)
        finally:
            for (_, table, key), own in zip(self._slots, kept, strict=True):
                table[key] = own

    def trained(self, order: Iterable[int]) -> list[int]:
        """Return the positions in `order` whose parameters are trained."""
        return [place for place in order if self.names[place] not in self.frozen]


def _slots_of(
    module: nn.Module, names: Sequence[str]
) -> list[tuple[int, dict[str, torch.Tensor], str]]:
    """Return every slot of parameters in tables of `module`; a tied one has several.

    Raises:
        ModuleUnitError: it is compiled to TorchScript, which has no such tables.
    """
    places = {id(module.get_parameter(name)): place for place, name in enumerate(names)}
    found: list[tuple[int, dict[str, torch.Tensor], str]] = []
    for path, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise ModuleUnitError(
                f"module {path}: TorchScript has parameters that none can replace"
            )
        table: dict[str, torch.Tensor] = vars(each)["_parameters"]
        found += [(places[id(one)], table, key) for key, one in table.items() if id(one) in places]
    return found


def resolve(module: nn.Module, units: Sequence[UnitChoice]) -> tuple[TorchUnit, ...]:
    """Return the units of `module`, in order.

    Raises:
        UnitError: two units have one name, a path leads to no submodule, a unit has a parameter
            that the module does not have, or a parameter is in no unit.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = tuple(choose(module, choice, names) for choice in units)
    if not found:
        raise ModuleUnitError("units: at least one is needed")
    for unit in found:
        if sum(other.key == unit.key for other in found) > 1:
            raise ModuleUnitError(f"unit {unit.name}: the name is used twice")
    held = {name for unit in found for name in unit.names}
    for name in names.values():
        if name not in held:
            raise ModuleUnitError(f"parameter {name}: it is in no unit")
    return found


def choose(module: nn.Module, choice: UnitChoice, names: Mapping[int, str]) -> TorchUnit:
    """Return the chosen unit of `module`; `names` are those of parameters, by id.

    Raises:
        ModuleUnitError: it is not part of the module.
    """
    if isinstance(choice, str):
        try:
            choice = (choice, module.get_submodule(choice))
        except AttributeError as error:
            raise ModuleUnitError(f"unit {choice}: the module has no such submodule") from error
    segment = choice.segment if isinstance(choice, SegmentChoice) else 0
    name, own = choice[0], choice[-1]
    local: list[str] = []
    qualified: list[str] = []
    shapes: list[torch.Size] = []
    frozen: set[str] = set()
    for local_name, parameter in own.named_parameters():
        if id(parameter) not in names:
            raise ModuleUnitError(
                f"unit {name}: its parameter {local_name} is not one of the module"
            )
        local.append(local_name)
        qualified.append(names[id(parameter)])
        shapes.append(parameter.shape)
        if not parameter.requires_grad:
            frozen.add(names[id(parameter)])
    return TorchUnit(
        name=name,
        module=own,
        names=tuple(qualified),
        local_names=tuple(local),
        shapes=tuple(shapes),
        frozen=frozenset(frozen),
        segment=segment,
        is_compiled=is_compiled(own),
    )
