"""Copies of tokens for experts: their order at the source, and their counts at the experts.

A rank sends its copies in the order of experts, and receives a block from each rank, which is in
the order of the experts (`zsim.schedule.counts`). The segments of a block share a `RowHandle`. The
segment that permutes tokens stores the order, and the host stores the counts. The segments that
run experts and sum their results use both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zsim.model.experts import DropRule, Drops
from zsim.schedule.mesh import Coordinates
from zsim.schedule.schedule import Schedule
from zsim.zero.names import EXPERT
from zsim_torch.module.tensor_part import PartBox


class ExpertPlace(NamedTuple):
    """A rank's index among the ranks that hold different experts, and their number."""

    number: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, schedule: Schedule, coordinates: Coordinates) -> "ExpertPlace":
        """Return the place of the rank at `coordinates`."""
        for group in schedule.groups:
            if group.name == EXPERT:
                mesh = schedule.mesh
                return cls(group.index(mesh, coordinates), group.size(mesh))
        return cls()

    def own(self, experts: int) -> slice:
        """Return the numbers of this rank's experts, of `experts`."""
        held = experts // self.ranks
        return slice(self.number * held, (self.number + 1) * held)

    def part_of(self, own: Sequence[int]) -> tuple[tuple[int, ...], tuple[PartBox, ...]]:
        """Return the shape of all experts' tensor, and this rank's box, whose shape is `own`."""
        held, *others = own
        box = PartBox.of_rows(0, self.number * held, held, others)
        return (self.ranks * held, *others), (box,)


class SentRows(NamedTuple):
    """Copies of tokens in the order of experts.

    `order` has the place of each copy among all `pairs` of a token and one of its choices, and
    `counts` the copies for each expert. With `pads`, experts have equally many copies, and places
    at the end of all pairs are of no token.
    """

    order: Tensor
    counts: Tensor
    pairs: int
    pads: bool = False


def in_order(chosen: Tensor, experts: int) -> SentRows:
    """Return the order of the copies of tokens, given the experts `chosen` [tokens, choices]."""
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat, minlength=experts)
    return SentRows(flat.argsort(stable=True), counts, len(flat))


def limited(rows: SentRows, weights: Tensor, drops: Drops, *, pads: bool) -> SentRows:
    """Return the rows that remain of each expert's, at most its capacity, in the same order.

    Those with the largest weights remain, or the first ones (`apply_router_token_dropping` of
    megatron/core/transformer/moe/moe_utils.py in August 2026, d98e8a64).
    """
    flat, capacity = weights.detach().reshape(-1), drops.capacity
    found: list[Tensor] = []
    for part in torch.split(rows.order, rows.counts.tolist()):
        kept = part[:capacity]
        if drops.by is DropRule.WEIGHT:
            ranked = flat[part].argsort(descending=True, stable=True)[:capacity]
            kept = part[ranked.sort().values]
        if pads:
            kept = torch.cat([kept, kept.new_full((capacity - len(kept),), rows.pairs)])
        found.append(kept)
    counts = torch.tensor([len(each) for each in found], device=rows.counts.device)
    return SentRows(torch.cat(found), counts, rows.pairs, pads)


def sums_of_rows(rows: Tensor, sent: SentRows, choices: int) -> Tensor:
    """Return the sum of the copies of each token, from rows in the order of experts."""
    order = sent.order
    if sent.pads or len(order) < sent.pairs:
        width = rows.shape[1]
        made = rows.new_zeros(sent.pairs + 1, width).index_copy(0, order, rows)
        return made[:-1].view(-1, choices, width).sum(1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return rows[inverse].view(-1, choices, rows.shape[1]).sum(1)


def expert_of_rows(counts: Tensor) -> Tensor:
    """Return the expert of each row that arrived, given the `counts` [sources, own experts]."""
    sources, held = counts.shape
    experts = torch.arange(held, device=counts.device).repeat(sources)
    return experts.repeat_interleave(counts.reshape(-1))


@dataclass(slots=True, eq=False)
class RowHandle:
    """The rows of one block with experts on this rank, by micro-batch.

    Attributes:
        layer: number of the block among those with experts.
        experts: experts of the block, over all ranks.
        place: index of this rank among the ranks with different experts.
        filled: copies from each rank for each expert if capacities are filled up; else 0.
        micro_batch: the micro-batch that segments of the block run now.
    """

    layer: int
    experts: int
    place: ExpertPlace
    filled: int = 0
    micro_batch: int = 0
    _sent: dict[int, SentRows] = field(default_factory=dict[int, SentRows])
    _counts: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def note_order(self, rows: SentRows) -> None:
        """Keep the rows that are sent."""
        self._sent[self.micro_batch] = rows

    def sent(self, micro_batch: int) -> Tensor:
        """Return the rows that are sent to each expert."""
        return self._sent[micro_batch].counts

    def rows(self) -> SentRows:
        """Return the rows that are sent."""
        return self._sent[self.micro_batch]

    def take_rows(self) -> SentRows:
        """Return the rows that were sent, and forget them."""
        return self._sent.pop(self.micro_batch)

    def note_counts(self, micro_batch: int, counts: Tensor) -> None:
        """Keep the rows from each rank to each own expert; recomputation reads them again."""
        self._counts[micro_batch] = counts

    def received(self) -> Tensor:
        """Return the rows that arrived, from each rank to each of this rank's experts."""
        if self.filled:
            ranks = self.place.ranks
            return torch.full((ranks, self.experts // ranks), self.filled)
        return self._counts[self.micro_batch]


class RowSegment(nn.Module):
    """A segment of a block that uses the rows of `handle`."""

    def __init__(self, handle: RowHandle) -> None:
        super().__init__()
        self.handle = handle
