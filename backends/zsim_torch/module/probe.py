"""Numbers in place of parameters on "meta", to plan a module before it has values.

Results, saved tensors and cost of a unit do not depend on the values, and the loss of the units is
compared with the module's own on them. Element (i, j, ...) is number i + j + ... of a random row:
this behaves like a random tensor, and needs memory only for the sum of its dimensions.
"""

import math
import zlib
from typing import Final

import torch
from torch import Tensor

_SPREAD: Final = 1 / 16
"""Standard deviation of vectors around one, the usual initial scale of norms."""


def probe(parameter: Tensor, name: str) -> Tensor:
    """Return numbers in the shape and data type of `parameter`, on the CPU, in shared memory."""
    shape, dtype = parameter.shape, parameter.dtype
    if not parameter.numel() or not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype).expand(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    row = torch.randn(sum(shape) - len(shape) + 1, generator=generator)
    if len(shape) > 1:
        row /= math.sqrt(parameter.numel() // shape[0])
    else:
        row.mul_(_SPREAD).add_(1)
    return row.to(dtype).as_strided(shape, (1,) * len(shape))


def value_or_probe(parameter: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return the values of `parameter` in a data type, or stand-ins if it is on "meta"."""
    found = probe(parameter, name) if parameter.is_meta else parameter.detach()
    return found.to(dtype)
