"""State that a run has beside the parameters, and that is gone when it is over.

The moments of an optimizer, a loss scale, masters finer than the parameters of the module: `train`
leaves the module its parameters alone. A second run would begin the rest anew, so it has to say so.
"""

from collections.abc import MutableMapping
from typing import Final, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zsim.schedule.operation import Compute, Fill, SetScalar, walk
from zsim.schedule.schedule import Kind, Program
from zsim_torch.torch_dtype import TORCH_DTYPE

MOMENTS: Final = "optimizer's moments"

_LEFT: Final = cast("MutableMapping[torch.Tensor, tuple[str, ...]]", WeakTensorKeyDictionary())
"""What the latest run of a parameter had beside it, by parameter."""


def leave_state(module: nn.Module, program: Program) -> None:
    """Note that a run of `program` has trained `module`, and what it had beside the parameters."""
    found = _state(module, program)
    for parameter in module.parameters():
        _LEFT[parameter] = found


def has_lost_moments(parameter: torch.Tensor) -> bool:
    """Return True if the latest run of a parameter had moments, which are gone."""
    return MOMENTS in _LEFT.get(parameter, ())


def lost_state(module: nn.Module, program: Program, *, given: bool) -> tuple[str, ...]:
    """Return what an earlier run of `module` had that `program` has, too, and would begin anew.

    With `given` parameters come from the caller, and so do masters.
    """
    left = {each for parameter in module.parameters() for each in _LEFT.get(parameter, ())}
    return tuple(
        each
        for each in _state(module, program)
        if each in left and not (given and each.endswith(_MASTERS))
    )


_MASTERS: Final = "masters"


def _state(module: nn.Module, program: Program) -> tuple[str, ...]:
    """Return in words what `program` keeps from step to step and does not write into `module`."""
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
    """Return the scalars that a step changes and that operations read: a loss scale."""
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
