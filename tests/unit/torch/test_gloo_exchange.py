"""Reduce-scatter and all-gather that copy less than torch's own for Gloo, and give its values."""

from itertools import product

import pytest
import torch
from shared_ranks import SharedPools
from torch import distributed

from zsim.schedule.operation import Reduction
from zsim_torch.execute.collectives import ALL_GATHER, REDUCE_SCATTER
from zsim_torch.execute.gloo_exchange import GlooExchange
from zsim_torch.observe.observer import Observer

FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TORCH = {
    Reduction.SUM: distributed.ReduceOp.SUM,
    Reduction.AVERAGE: distributed.ReduceOp.AVG,
}
ELEMENTS = 24


def brought(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(ELEMENTS, generator=generator)).to(dtype)


def on_rank() -> list[tuple[bool, bool]]:
    """For each format and reduction: whether ours has torch's bits, and those of ranks in order."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    group, exchange = distributed.new_group(list(range(ranks))), GlooExchange()
    assert isinstance(group, distributed.ProcessGroup)
    found: list[tuple[bool, bool]] = []
    for dtype, reduction in product(FORMATS, TORCH):
        source = brought(rank, dtype)
        own, theirs = (torch.empty(ELEMENTS // ranks, dtype=dtype) for _ in range(2))
        exchange.reduce_scatter(own, source, group, reduction).wait()
        REDUCE_SCATTER(theirs, source, op=TORCH[reduction], group=group)
        first, *others = (brought(each, dtype).chunk(ranks)[rank] for each in range(ranks))
        for each in others:
            first = first + each
        if reduction is Reduction.AVERAGE:
            first = first / ranks
        found.append((torch.equal(own, theirs), torch.equal(own, first)))
        assert torch.equal(source, brought(rank, dtype))
        # In place, from a place of its own, and from one that overlaps it.
        for start in (rank * len(own), max(rank * len(own) - 1, 0), None):
            whole, expected = (torch.zeros(ELEMENTS, dtype=dtype) for _ in range(2))
            part = own if start is None else whole[start : start + len(own)].copy_(own)
            exchange.all_gather(whole, part, group).wait()
            ALL_GATHER(expected, own, group=group)
            assert torch.equal(whole, expected), (dtype, start)
    return found


def observed() -> tuple[tuple[str, float], ...]:
    """What an observer counts of one of each, and of no call that they are made of."""
    ranks = distributed.get_world_size()
    group = distributed.new_group(list(range(ranks)), group_desc="data")
    assert isinstance(group, distributed.ProcessGroup)
    exchange = GlooExchange()
    whole, own = torch.zeros(ELEMENTS), torch.ones(ELEMENTS // ranks)
    with Observer() as observer:
        exchange.all_gather(whole, own, group).wait()
        exchange.reduce_scatter(own, whole, group, Reduction.SUM).wait()
    exchange.all_gather(whole, own, group).wait()  # nobody watches
    return tuple(each for each in observer.figures() if "wire" in each[0])


@pytest.mark.matrix(6)
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_exchange_has_the_values_of_ranks_in_order_and_of_torch_on_two(
    pool_of: SharedPools, ranks: int
) -> None:
    pool = pool_of(ranks)
    for found in pool.run(on_rank):
        assert all(in_order for _, in_order in found)
        assert all(as_torch for as_torch, _ in found) or ranks > 2
    sent = 4 * ELEMENTS // ranks * (ranks - 1)
    assert pool.run(observed)[0] == (
        ("wire_bytes/data/all_gather", sent),
        ("wire_count/data/all_gather", 1),
        ("wire_bytes/data/reduce_scatter", sent),
        ("wire_count/data/reduce_scatter", 1),
    )
