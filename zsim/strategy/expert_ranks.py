"""Ranks of experts: their own rank order over the ranks that other layers use by another order.

Megatron-LM numbers the ranks of a stage twice (`RankGenerator` of `megatron/core/parallel_state.py`
in August 2026, d98e8a64): by tensor, context and data axis, the tensor axis fastest; and by
expert-tensor, expert and expert-data axis, the expert-tensor axis fastest. An expert group thus
consists of data, context and tensor ranks ("parallel folding"), and EDP = world / (ETP x EP x
PP).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pydantic_core import InitErrorDetails

from zsim.config_error import refusal

Degree = tuple[str, int]
"""An axis and the number of its ranks."""

SHOWN = 4
"""Maximum number of degrees that a message lists."""


class Conflict(NamedTuple):
    """Degrees that have no mesh in common: products of the fastest axes of two rank orders."""

    ranks: int
    axes: tuple[str, ...]
    other_ranks: int
    other_axes: tuple[str, ...]


def conflict_of(one: Sequence[Degree], other: Sequence[Degree]) -> Conflict | None:
    """Return the first degrees of two rank orders that do not nest; None if all do.

    Both orders start with the fastest axis. They have a mesh in common if and only if, of the
    ranks after which their axes repeat, each number divides the next larger one.
    """
    first, second = dict(_repeats(one)), dict(_repeats(other))
    for low, high in pairwise(sorted({*first, *second})):
        if high % low:
            # Numbers of one order divide each other, so these are of different orders.
            here, there = (low, high) if low in first and high in second else (high, low)
            return Conflict(here, first[here], there, second[there])
    return None


def _repeats(order: Sequence[Degree]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the ranks after which each axis of several ranks repeats, with all faster axes."""
    names: tuple[str, ...] = ()
    ranks = 1
    for name, size in order:
        if size > 1:
            names, ranks = (*names, name), ranks * size
            yield ranks, names


def against_order(
    dense: Sequence[Degree], expert: int, expert_tensor: int
) -> Iterator[InitErrorDetails]:
    """Yield errors of the degrees of experts for the rank order of the other layers.

    `dense` are the axes of one replica and stage, the fastest first.
    """
    ranks = 1
    for _, size in dense:
        ranks *= size
    shown = " x ".join(name for name, _ in dense)
    if (asked := expert * expert_tensor) > ranks:
        what = f"x expert_tensor {expert_tensor} is more than the {ranks} ranks of {shown}"
        yield refusal("parallel.expert", expert, f"{what}; use at most {ranks // expert_tensor}")
        return
    if ranks % asked:
        what = f"x expert_tensor {expert_tensor} must divide the {ranks} ranks of {shown}"
        yield refusal("parallel.expert", expert, f"{what}{_fitting(dense, expert, expert_tensor)}")
        return
    found = conflict_of(dense, _experts(expert, expert_tensor, ranks))
    if found is None:
        return
    field, value = "parallel.expert", expert
    if found.other_axes == ("expert_tensor",):
        field, value = "parallel.expert_tensor", expert_tensor
    product = "" if len(found.other_axes) == 1 else f"x expert_tensor = {found.other_ranks} "
    what = f"{product}and {' x '.join(found.axes)} = {found.ranks} must divide one another"
    yield refusal(field, value, f"{what}{_fitting(dense, expert, expert_tensor)}")


def _fitting(dense: Sequence[Degree], expert: int, expert_tensor: int) -> str:
    """Return a clause that lists the closest expert degrees that fit, if there are any."""
    ranks = 1
    for _, size in dense:
        ranks *= size
    fits = [
        each
        for each in range(1, ranks // expert_tensor + 1)
        if ranks % (each * expert_tensor) == 0
        and conflict_of(dense, _experts(each, expert_tensor, ranks)) is None
    ]
    closest = sorted(sorted(fits, key=lambda each: abs(each - expert))[:SHOWN])
    if not closest:
        return "; use another expert_tensor"
    *others, last = map(str, closest)
    return f"; use {', '.join(others)} or {last}" if others else f"; use {last}"


def _experts(expert: int, expert_tensor: int, ranks: int) -> list[Degree]:
    return [
        ("expert_tensor", expert_tensor),
        ("expert", expert),
        ("expert_data", ranks // (expert * expert_tensor)),
    ]


def cut_axis(
    dense: Sequence[Degree], whole: Sequence[str], expert: int, expert_tensor: int
) -> str | None:
    """Return the first axis named in `whole` that a degree of experts cuts; None if none does."""
    ranks = 1
    for name, size in dense:
        for bound in (expert_tensor, expert_tensor * expert):
            if name in whole and ranks < bound < ranks * size:
                return name
        ranks *= size
    return None
