"""Tensors that autograd saves while a unit runs: parameters as handles, all else as it is."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Final, NamedTuple

import torch

from zsim_torch.module.absent import LeftMemory
from zsim_torch.module.unit import TorchUnit, UnitRunError


class _Handle(NamedTuple):
    """Part of a parameter, or of an input behind them: which, and elements from its start."""

    number: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class InputEntry(Enum):
    """Ways to keep for backward an input whose memory may be another one's by then."""

    BOUND = auto()
    """Backward is given it again, from other memory perhaps."""
    COPIED = auto()
    """Backward is not given it again, so what it reads is copied."""


class _Kept(NamedTuple):
    """A tensor that autograd keeps, and its version when it was kept."""

    tensor: torch.Tensor
    version: int


CHANGED: Final = "modified by an inplace operation"
"""Words of autograd's own error about a tensor that it has saved."""


def changed_in_place(unit: str) -> str:
    """Return what is said of a unit whose saved tensor was changed."""
    return f"unit {unit}: a tensor that its backward needs was changed in place"


def version(tensor: torch.Tensor) -> int:
    """Return how often the memory of `tensor` was changed in place."""
    return tensor._version  # pyright: ignore[reportPrivateUsage]  # torch has no public name


class Saving:
    """Packs what autograd saves while a unit runs, and unpacks it at backward.

    It holds no tensor after forward; `views` are bound for the time of the backward.
    """

    def __init__(self, unit: TorchUnit, views: Sequence[torch.Tensor]) -> None:
        self.unit = unit.name
        self.device = views[0].device.type if views else "cpu"
        self.views: Sequence[torch.Tensor] | None = None
        self.windows: dict[int, list[tuple[int, int, int]]] = {}
        self.binds_inputs = False
        self._count = len(views)
        self._copied: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for index, view in enumerate(views):
            if view.numel():
                storage = self._bind(view, index)
                self._storages[storage.data_ptr()] = weakref.ref(storage)

    def _bind(self, view: torch.Tensor, index: int) -> torch.UntypedStorage:
        start = int(view.storage_offset())
        storage = view.untyped_storage()
        window = (start, start + view.numel(), index)
        self.windows.setdefault(storage.data_ptr(), []).append(window)
        return storage

    def enter_input(self, position: int, value: torch.Tensor, entry: InputEntry) -> None:
        """Bind the input at `position` to another view later, or copy what is kept of it."""
        if value.numel() and entry is InputEntry.BOUND:
            self.binds_inputs = True
            self._bind(value, self._count + position)
        elif value.numel():
            self._copied[value.untyped_storage().data_ptr()] = value

    def end_forward(self) -> None:
        """Forget what was copied: other memory may be where it was."""
        self._copied.clear()
        self._copies.clear()

    def _kept_copy(self, tensor: torch.Tensor) -> _Kept | None:
        """Return `tensor` in a copy of the input that it is part of, made once; None if of none."""
        pointer = tensor.untyped_storage().data_ptr()
        value = self._copied.get(pointer)
        if value is None:
            return None
        if pointer not in self._copies:
            self._copies[pointer] = value.detach().clone()
        offset = tensor.storage_offset() - value.storage_offset()
        part = self._copies[pointer].as_strided(tensor.shape, tensor.stride(), offset)
        return _Kept(part, version(part))

    def pack(self, tensor: torch.Tensor) -> _Handle | _Kept:
        """Return a handle for a part of a parameter, anything else as it is."""
        if torch.is_autocast_enabled(self.device):
            raise UnitRunError(
                f"unit {self.unit}: autocast inside the unit keeps cast copies of its parameters; "
                "choose a precision in the strategy instead"
            )
        # All storages without elements have one data pointer, 0.
        if tensor.numel():
            start = int(tensor.storage_offset())
            for low, high, index in self.windows.get(tensor.untyped_storage().data_ptr(), ()):
                if low <= start < high:
                    return _Handle(index, start - low, tensor.shape, tensor.stride())
            if self._copied and (kept := self._kept_copy(tensor)) is not None:
                return kept
        return _Kept(tensor.detach(), version(tensor))

    def unpack(self, packed: _Handle | _Kept) -> torch.Tensor:
        """Return the part of the parameter where it is now, or the tensor that was kept."""
        if isinstance(packed, _Kept):
            if version(packed.tensor) != packed.version:
                raise UnitRunError(changed_in_place(self.unit))
            return packed.tensor
        if self.views is None:
            raise UnitRunError(f"unit {self.unit}: its backward reads parameters outside its turn")
        view = self.views[packed.number]
        offset = view.storage_offset() + packed.offset
        return view.as_strided(packed.size, packed.stride, offset)

    def watch(self, views: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """Refuse reads of memory that held the parameters in forward, while they are in `views`.

        Such memory lives on where somebody kept it or the schedule has not freed it yet. Both are
        rare: most backwards run without the mode, which makes calls of torch in Python slower.
        """
        there = {pointer for pointer, storage in self._storages.items() if storage() is not None}
        there -= {view.untyped_storage().data_ptr() for view in views}
        return LeftMemory(there) if there else nullcontext()
