"""Tensors that enter a unit: outputs of one node of autograd, where their gradients are taken."""

from collections.abc import Sequence
from typing import Final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class _Enter(torch.autograd.Function):
    """Tensors without history become outputs of one node, which holds nothing."""

    @staticmethod
    def forward(
        ctx: object, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return `tensors`, as outputs of this node."""
        return tuple(each.detach() for each in tensors)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[None, None]:
        """Never reached: gradients are taken at this node's edges."""
        return None, None


ENTERED: Final = f"{_Enter.__name__}Backward"
"""Name under which autograd calls the node of entered tensors."""

_ANCHOR: Final = torch.empty(0, requires_grad=True)


def enter(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return `tensors` as outputs of one node."""
    if not tensors:
        return ()
    entered: tuple[torch.Tensor, ...] = _Enter.apply(_ANCHOR, tensors)  # type: ignore[no-untyped-call]
    return entered


def edges_of(entered: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Return the edges of tensors that were entered together: one node, which the first keeps."""
    if not entered:
        return []
    node, _, token = get_gradient_edge(entered[0])
    return [GradientEdge(node, number, token) for number in range(len(entered))]
