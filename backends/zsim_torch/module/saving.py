"""Tensors that autograd saves while a unit runs: parameters as handles, others as they are."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Final, NamedTuple

import torch

from zsim_torch.module.absent import LeftMemory
from zsim_torch.module.unit import TorchUnit, UnitRunError


class _Handle(NamedTuple):
    """Part of a parameter or bound input: its number, and the elements from its start."""

    number: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class InputEntry(Enum):
    """How to save an input whose memory may be reused before backward."""

    BOUND = auto()
    """Backward gets the input again, perhaps in other memory."""
    COPIED = auto()
    """Backward does not get the input again, so the parts that it reads are copied."""


class _Kept(NamedTuple):
    """A tensor that autograd saved, and its version at that time."""

    tensor: torch.Tensor
    version: int


CHANGED: Final = "modified by an inplace operation"
"""Text in autograd's own error about a changed saved tensor."""


def changed_in_place(unit: str) -> str:
    """Return the error message for a unit whose saved tensor was changed."""
    return f"unit {unit}: a tensor that its backward needs was changed in place"


def version(tensor: torch.Tensor) -> int:
    """Return the version of `tensor`: the number of in-place changes of its memory."""
    return tensor._version  # pyright: ignore[reportPrivateUsage]  # torch has no public name


class Saving:
    """Packs the tensors that autograd saves while a unit runs, and unpacks them at backward.

    It holds no parameters after forward; `views` are bound during the backward.
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
        """Bind the input at `position` to another view later, or copy the saved part of it."""
        if value.numel() and entry is InputEntry.BOUND:
            self.binds_inputs = True
            self._bind(value, self._count + position)
        elif value.numel():
            self._copied[value.untyped_storage().data_ptr()] = value

    def end_forward(self) -> None:
        """Forget the copied inputs, since their addresses may be reused."""
        self._copied.clear()
        self._copies.clear()

    def _kept_copy(self, tensor: torch.Tensor) -> _Kept | None:
        """Return `tensor` as a view of a copy of its input, or None if it is in no input."""
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
        """Return a handle for a part of a parameter, or the tensor itself."""
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
        """Return the part of the parameter in its current memory, or the saved tensor."""
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
        """Return a context that refuses reads of the forward's parameter memory, except `views`.

        Such memory still exists if another object keeps it, or if the schedule has not freed it
        yet. Both are rare: most backwards run without this mode, which slows down torch calls in
        Python.
        """
        there = {pointer for pointer, storage in self._storages.items() if storage() is not None}
        there -= {view.untyped_storage().data_ptr() for view in views}
        return LeftMemory(there) if there else nullcontext()
