"""Functions that make tensors and storages from data, below torch's dispatcher."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zsim_record.record.pretended_streams import DEVICE_TYPE

FROM_DATA = ("tensor", "as_tensor", "asarray")
"""Functions of torch that read numbers from lists of tensors."""


@contextmanager
def factories_replaced() -> Generator[None]:
    """Return a context in which tensors and storages can be created from data on the device."""
    lifts_first = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        # torch.tensor() then creates a CPU tensor and copies it to the device by an operator.
        torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003  (a function of torch)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts_first)
        for name in FROM_DATA:
            stack.enter_context(patch.object(torch, name, _reading_items(getattr(torch, name))))
        storage: Any = torch.UntypedStorage
        stack.enter_context(patch.object(storage, "__new__", _storage_made(storage.__new__)))
        yield


def _reading_items(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `make` so that the host reads each tensor in a list, as in torch."""

    @wraps(make)
    def made(data: object, *args: Any, **kwargs: Any) -> torch.Tensor:
        return make(_numbers(data) if isinstance(data, (list, tuple)) else data, *args, **kwargs)

    return made


def _numbers(data: Iterable[Any]) -> list[Any]:
    return [
        _numbers(each)
        if isinstance(each, (list, tuple)) or (isinstance(each, FakeTensor) and each.dim())
        else each.item()
        if isinstance(each, FakeTensor)
        else each
        for each in data
    ]


def _storage_made(make: Callable[..., torch.UntypedStorage]) -> Callable[..., Any]:
    """Wrap `make` to support the pretended device."""

    def made(kind: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is None:
            return make(kind, *args, **kwargs)
        if torch.device(device).type == DEVICE_TYPE:
            size = args[0] if args else 0
            return torch.empty(size, dtype=torch.uint8, device=DEVICE_TYPE).untyped_storage()
        return make(kind, *args, device=device, **kwargs)

    return made
