"""Tell tensors with values from those of a recording and on "meta", which have none."""

import torch
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is strided and has values: not on "meta", not of a recording."""
    return tensor.layout is torch.strided and not tensor.is_meta and not is_pretended(tensor)


def is_pretended(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of a recording (`zsim record`), which has a shape and no values."""
    return isinstance(tensor, FakeTensor)
