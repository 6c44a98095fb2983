"""Norms over the last dimension."""

from typing import Any

import torch
from torch import Tensor, nn

from zsim.model.architecture import Norm, Transformer

EPSILON = 1e-5
"""Added to the denominator, as in nn.LayerNorm and Llama 2."""


class _ByRootMeanSquare(torch.autograd.Function):
    """RMSNorm that saves its input and one number per row, as torch's fused one on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401  (torch's own)
        """Return each row over its root mean square, times `weight`."""
        wide = _widened(rows)
        inverse = (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        ctx.save_for_backward(rows, weight, inverse)
        return (wide * inverse).to(rows.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return gradients of rows and weight."""
        rows, weight, inverse = ctx.saved_tensors
        normed = _widened(rows) * inverse
        incoming = _widened(gradients[0])
        scaled = incoming * weight
        found = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        summed = (incoming * normed).flatten(0, -2).sum(0)
        return found.to(rows.dtype), summed.to(weight.dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


class RootMeanSquareNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019), in fp32 (fp64 in fp64)."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """Return each row over its root mean square, times the weight."""
        return by_root_mean_square(rows, self.weight)


def by_root_mean_square(rows: Tensor, weight: Tensor) -> Tensor:
    """Return each row of `rows` over its root mean square, times `weight`."""
    made: Tensor = _ByRootMeanSquare.apply(rows, weight)  # type: ignore[no-untyped-call]
    return made


def norm(shape: Transformer, dtype: torch.dtype, width: int | None = None) -> nn.Module:
    """Return the norm of `shape` over `width` elements, by default the hidden state."""
    width = shape.hidden_size if width is None else width
    if shape.norm is Norm.RMS:
        return RootMeanSquareNorm(width, dtype)
    return nn.LayerNorm(width, eps=EPSILON, bias=shape.bias, dtype=dtype)
