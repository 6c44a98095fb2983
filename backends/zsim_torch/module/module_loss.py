"""Compute the loss of a module on a micro-batch, and check the tensors of the batch."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.module.unwritten import version_of

LossOf = Callable[[nn.Module, object], Tensor]
"""A function that returns the loss of a module on a micro-batch."""

Extent = tuple[str, torch.Size, torch.dtype]
"""A tensor of a batch: its path, shape and data type."""


def loss_of(module: nn.Module, batch: object) -> Tensor:
    """Return the loss of a batch, which is passed as arguments if it is a mapping, tuple or list.

    Raises:
        ModuleUnitError: the output is not one number and has no `loss` that is one.
    """
    if isinstance(batch, Mapping):
        made = module(**batch)
    elif isinstance(batch, tuple | list):
        made = module(*batch)
    else:
        made = module(batch)
    found = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", made)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ModuleUnitError(
            f"module: returns {_described(found)} for a batch; say loss=lambda module, batch: ..."
        )
    return found


def _described(made: object) -> str:
    if isinstance(made, Tensor):
        return f"a tensor of {made.numel()} elements"
    return "no loss" if made is None else f"a {type(made).__name__}"


class WithLoss(nn.Module):
    """A module that returns its loss."""

    def __init__(self, module: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.module = module
        self._loss = loss
        self.training = module.training

    def forward(self, batch: object) -> Tensor:
        """Return the loss of a micro-batch."""
        return self._loss(self.module, batch)


def tree_tensors(value: object) -> list[Tensor]:
    """Return the tensors in containers."""
    return [each for _, each in tree_flatten_with_path(value)[0] if isinstance(each, Tensor)]


def extents(batch: object) -> list[Extent]:
    """Return path, shape and data type of each tensor of a batch.

    All batches must agree in these.
    """
    found, _ = tree_flatten_with_path(batch)
    return [
        (f"batch{keystr(path)}", each.shape, each.dtype)
        for path, each in found
        if isinstance(each, Tensor)
    ]


def need_extents(found: list[Extent], known: list[Extent]) -> None:
    """Raise ModuleUnitError unless a batch has the same tensors as the first one."""
    if [each[0] for each in found] != [each[0] for each in known]:
        raise ModuleUnitError(
            f"batch: has {', '.join(each[0] for each in found)}; the schedule is made for "
            f"{', '.join(each[0] for each in known)}"
        )
    for (path, shape, dtype), (_, first, before) in zip(found, known, strict=True):
        if (shape, dtype) != (first, before):
            raise ModuleUnitError(
                f"batch: {path} is {_extent(shape, dtype)}, the schedule is made for "
                f"{_extent(first, before)}"
            )


def _extent(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape)) or 'one'} {str(dtype).removeprefix('torch.')}"


def versions(batch: object) -> list[int]:
    """Return the version of each tensor of a batch: the number of in-place changes."""
    return [version_of(each) for each in tree_tensors(batch)]


def need_unwritten(batch: object, before: list[int]) -> None:
    """Raise ModuleUnitError if a tensor of the batch was changed in place."""
    if versions(batch) != before:
        raise ModuleUnitError("module: its forward writes its batch in place; make new tensors")
