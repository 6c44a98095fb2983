"""State of a run besides the parameters, which is lost when the run ends.

Examples are moments of an optimizer, a loss scale, and masters in a wider format than the module's
parameters: `train` writes only the parameters back to the module. A second run would start the rest
anew, so it must ask for that explicitly.
"""

from collections.abc import MutableMapping
from typing import Final, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zsim.schedule.operation import Compute, Fill, SetScalar, walk
from zsim.schedule.schedule import Kind, Program
from zsim_torch.ground.torch_dtype import TORCH_DTYPE

MOMENTS: Final = "optimizer's moments"

_LEFT: Final = cast("MutableMapping[torch.Tensor, tuple[str, ...]]", WeakTensorKeyDictionary())
"""Lost state of the latest run, by parameter."""


def leave_state(module: nn.Module, program: Program) -> None:
    """Record that a run of `program` has trained `module`, and the state that it had."""
    found = _state(module, program)
    for parameter in module.parameters():
        _LEFT[parameter] = found


def has_lost_moments(parameter: torch.Tensor) -> bool:
    """Return True if the latest run of a parameter had moments, which are lost."""
    return MOMENTS in _LEFT.get(parameter, ())


def lost_state(module: nn.Module, program: Program, *, given: bool) -> tuple[str, ...]:
    """Return the state that an earlier run of `module` had and that `program` would reset.

    With `given`, parameters come from the caller, and so do masters.
    """
    left = {each for parameter in module.parameters() for each in _LEFT.get(parameter, ())}
    return tuple(
        each
        for each in _state(module, program)
        if each in left and not (given and each.endswith(_MASTERS))
    )


_MASTERS: Final = "masters"


def _state(module: nn.Module, program: Program) -> tuple[str, ...]:
    """Return names of the state that `program` keeps across steps but not in `module`."""
    kept = [program.by_name[name] for name in program.persistent]
    found: list[str] = []
    if any(buffer.kind is Kind.MOMENT for buffer in kept):
        found.append(MOMENTS)
    masters = {buffer.dtype for buffer in kept if buffer.kind is Kind.MASTER}
    held = {parameter.dtype for parameter in module.parameters()}
    for dtype in sorted(masters):
        if any(each.itemsize < TORCH_DTYPE[dtype].itemsize for each in held):
            found.append(f"{dtype} {_MASTERS}")
    return (*found, *sorted(_changing_scalars(program)))


def _changing_scalars(program: Program) -> set[str]:
    """Return the scalars that a step changes and that operations read, such as a loss scale."""
    changed: set[str] = set()
    read: set[str] = set()
    for operation in walk(program.step):
        match operation:
            case SetScalar(scalar=scalar):
                changed.add(scalar)
            case Fill(scalar=str(scalar)):
                read.add(scalar)
            case Compute(scalars=scalars):
                read.update(scalars)
            case _:
                pass
    return changed & read
