"""Bytes of all storages that live, as they are now: a storage may grow and shrink."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Sums up what lives after every operator; `peak` is the most since it was last set."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.peak: int = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(  # any operator passes here
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Run the operator; look at what it was given and what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, made)):
            if isinstance(tensor, DTensor):  # it claims the size of the whole
                self.see(tensor.to_local())
            elif isinstance(tensor, torch.Tensor):
                self.see(tensor)
        self.peak = max(self.peak, self.bytes())
        return made

    def see(self, tensor: torch.Tensor) -> None:
        """Know of the storage of `tensor` from now on; on "meta" there is none."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            number = id(storage)
            self._storages[number] = weakref.ref(
                storage, lambda _: self._storages.pop(number, None)
            )

    def bytes(self) -> int:
        """What lives now."""
        alive = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)
