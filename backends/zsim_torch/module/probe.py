"""Numbers in the place of parameters that have none yet: a module on "meta" is planned with them.

What a unit returns, keeps and costs does not depend on them, and the loss of units is compared with
the module's own on them. Element (i, j, ...) is number i + j + ... of a row of random ones: such a
tensor is as good as a drawn one, and takes the memory of its extents added up.
"""

import math
import zlib
from typing import Final

import torch
from torch import Tensor

_SPREAD: Final = 1 / 16
"""Distance of vectors from one, which scales of norms begin with."""


def probe(parameter: Tensor, name: str) -> Tensor:
    """Return numbers in the shape and format of `parameter`, on the CPU; they share memory."""
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
    """Return the values of `parameter` in a format, or what stands for them on "meta"."""
    found = probe(parameter, name) if parameter.is_meta else parameter.detach()
    return found.to(dtype)
