"""Make tensors outputs of one autograd node, so that a unit's gradients can be taken there."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class _Enter(torch.autograd.Function):
    """Makes tensors without history the outputs of one node, which holds no tensors."""

    @staticmethod
    def forward(
        ctx: object, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return `tensors`, as outputs of this node."""
        return tuple(each.detach() for each in tensors)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[None, None]:
        """Do nothing; never called, since gradients are taken at this node's edges."""
        return None, None


_LEAF: Final = "AccumulateGrad"
ENTRIES: Final = frozenset([f"{_Enter.__name__}Backward", _LEAF])
"""Names of autograd nodes through which tensors may have entered a unit."""

_MARK: Final = "_zsim_is_entered"
"""Attribute that marks leaves created by this module."""

_ANCHOR: Final = torch.empty(0, requires_grad=True)


def enter(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return `tensors` as outputs of one node."""
    if not tensors:
        return ()
    entered: tuple[torch.Tensor, ...] = _Enter.apply(_ANCHOR, tensors)  # type: ignore[no-untyped-call]
    return entered


def edges_of(entered: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Return the edges of tensors that were entered together; gradients must be enabled.

    They share one node, which lives as long as a node derived from it, as in `get_gradient_edge`.
    The checks of that function are made once for all tensors.
    """
    if not entered:
        return []
    first = entered[0]
    node, token = first.grad_fn, first.view_as(first).grad_fn
    assert node is not None
    return [GradientEdge(node, number, token) for number in range(len(entered))]


@dataclass(frozen=True, slots=True)
class Leaves:
    """Parameters that stay in memory, as autograd leaves for every step.

    A leaf's node holds its memory, which is harmless here. Entering parameters anew in each step
    takes as long as a small layer.
    """

    tensors: list[torch.Tensor]
    edges: list[GradientEdge | None]

    @classmethod
    def of(cls, views: Sequence[torch.Tensor], trained: Container[int]) -> Self:
        """Return leaves on the memory of `views`; only places in `trained` get an edge."""
        tensors = [view.detach() for view in views]
        edges: list[GradientEdge | None] = [None] * len(tensors)
        for place, tensor in enumerate(tensors):
            if place in trained:
                setattr(tensor.requires_grad_(), _MARK, True)
                edges[place] = get_gradient_edge(tensor)
        return cls(tensors, edges)


def is_entered(node: Node) -> bool:
    """Return True if a node in `ENTRIES` was created here, and is not another leaf."""
    return type(node).__name__ != _LEAF or hasattr(getattr(node, "variable", None), _MARK)
