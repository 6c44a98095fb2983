"""Functions of torch that a forward may not call between blocks, if it is planned ahead."""

from collections.abc import Sequence
from typing import Final

import torch

from zsim_torch.module.block_result import name_of
from zsim_torch.module.forward_plan import PlannedParts
from zsim_torch.module.unit import ModuleUnitError

_DIFFERENTIATE: Final = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_FREEZES: Final = (
    torch.Tensor.requires_grad_,
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad",)),
)


MARK: Final = "_zsim_symbol"
"""Attribute of tensors with the symbol that the tensor stands for."""


def need_followed(func: object, parts: PlannedParts, leaves: Sequence[object], place: int) -> None:
    """Raise ModuleUnitError if zsim cannot plan a call of `func` in the unit at `place`."""
    if func in _DIFFERENTIATE:
        raise ModuleUnitError(
            f"module: its forward calls {name_of(func)}, which zsim follows inside blocks alone"
        )
    names = [parts.names[id(each)] for each in leaves if id(each) in parts.names]
    if func in _FREEZES and names:
        raise ModuleUnitError(
            f"module: its forward sets requires_grad of {names[0]}; which parameters are trained "
            "is settled when training begins"
        )
    made = [each for each in (getattr(leaf, MARK, None) for leaf in leaves) if each is not None]
    if func is torch.Tensor.register_hook and (names or made[0].maker != place):
        raise ModuleUnitError(
            "module: its forward puts a hook on a parameter, or on what a block returned; put it "
            "inside the block"
        )
    if torch.is_autocast_enabled(parts.device.type):
        raise ModuleUnitError(
            f"module: its forward calls {name_of(func)} under autocast; choose a precision in "
            "the strategy instead"
        )
