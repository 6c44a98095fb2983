"""Schedules of other runtimes train on real ranks as one process does."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from emulated_strategies import EMULATED, strategy
from shared_ranks import SharedPools
from tiny_training import BOUND, Case, Parameters, Result, by_plain_loop, distance, trained_on_ranks

from zsim.proof import against_trace as refinement
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.trace.trace import Trace
from zsim_torch.supervise.ranks import RankPool

ONE = (1, Checkpointing.FULL)
TWO = (2, Checkpointing.NONE)
"""Micro-batches of a step, and what forward keeps."""


@cache
def cases(data: int, replicate: int, sort: tuple[int, Checkpointing]) -> dict[str, Case]:
    """Every runtime."""
    found: dict[str, Case] = {}
    micro_batches, checkpointing = sort
    for name, named in EMULATED.items():
        made = strategy(
            named,
            data=data,
            replicate=replicate,
            micro_batches=micro_batches,
            checkpointing=checkpointing,
            clip_norm=0.1,
        )
        if made is not None:
            found[name] = Case(made, steps=2, witness=True)
    return found


def whole(results: Sequence[Result]) -> Trace:
    """One trace of what every rank saw of itself."""
    traces = [result.trace for result in results]
    ranks = tuple(rank for trace in traces for rank in trace.ranks)
    ends = zip(*(trace.step_end_ps for trace in traces), strict=True)
    return replace(traces[0], ranks=ranks, step_end_ps=tuple(max(each) for each in ends))


EVERY, EVEN, ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
FIRST, SECOND, THIRD = (slice(start, None, 4) for start in range(3))
"""Runtimes by their place in the list. In the suite each trains on two ranks with two
micro-batches, those with replicas on two by two, and three of four on one other mesh."""


MESHES = [
    (1, 1, TWO, THIRD),
    (2, 1, TWO, EVERY),
    (3, 1, ONE, FIRST),
    (4, 1, TWO, SECOND),
    (2, 2, ONE, ODD),
    (2, 2, TWO, EVEN),
]
Sort = tuple[int, Checkpointing]
Plain = tuple[Parameters, Parameters, tuple[float, ...]]
SUITE = [
    (data, replicate, sort, name)
    for data, replicate, sort, share in MESHES
    for name in list(cases(data, replicate, sort))[share]
]
REST = [
    (data, replicate, sort, name)
    for data, replicate in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2))
    for sort in (ONE, TWO)
    for name in cases(data, replicate, sort)
]


def id_of(value: object) -> str:
    return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else f"{value}"


@cache
def plain(
    data: int, replicate: int, sort: Sort
) -> tuple[Parameters, Parameters, tuple[float, ...]]:
    """Train in one process: all runtimes of a mesh are compared with that."""
    return by_plain_loop(next(iter(cases(data, replicate, sort).values())))


@pytest.mark.matrix(24)
@pytest.mark.parametrize(("data", "replicate", "sort", "name"), SUITE, ids=id_of)
def test_every_runtime_trains_as_one_process_does(
    pool_of: SharedPools, data: int, replicate: int, sort: Sort, name: str
) -> None:
    assert_as_one_process(pool_of(data * replicate), data, replicate, sort, name)


@pytest.mark.long
@pytest.mark.parametrize(("data", "replicate", "sort", "name"), REST, ids=id_of)
def test_every_runtime_trains_on_every_mesh_as_one_process_does(
    pool_of: SharedPools, data: int, replicate: int, sort: Sort, name: str
) -> None:
    assert_as_one_process(pool_of(data * replicate), data, replicate, sort, name)


def assert_as_one_process(pool: RankPool, data: int, replicate: int, sort: Sort, name: str) -> None:
    case = cases(data, replicate, sort)[name]
    results = [result for (result,) in trained_on_ranks(pool, [case])]
    before, after, losses = plain(data, replicate, sort)
    assert distance(results[0].parameters, after, before) <= BOUND[Precision.FP32]
    assert results[0].losses == pytest.approx(losses, rel=1e-3)
    assert refinement.examine(case.schedule(), whole(results)) == []
