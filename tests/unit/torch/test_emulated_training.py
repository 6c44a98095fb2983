"""Schedules of other runtimes train on real ranks as one process does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from emulated_strategies import EMULATED, strategy
from tiny_training import BOUND, Case, Result, by_plain_loop, distance, trained_on_ranks

from zsim.proof import against_trace as refinement
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.trace.trace import Trace
from zsim_torch.supervise.ranks import RankPool

ONE = (1, Checkpointing.FULL)
TWO = (2, Checkpointing.NONE)
"""Micro-batches of a step, and what forward keeps."""


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


@pytest.mark.parametrize(
    ("data", "replicate", "sort", "share"),
    [
        (1, 1, TWO, THIRD),
        (2, 1, TWO, EVERY),
        (3, 1, ONE, FIRST),
        (4, 1, TWO, SECOND),
        (2, 2, ONE, ODD),
        (2, 2, TWO, EVEN),
        *(
            pytest.param(*mesh, sort, EVERY, marks=pytest.mark.long)
            for mesh in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2))
            for sort in (ONE, TWO)
        ),
    ],
)
def test_every_runtime_trains_as_one_process_does(
    data: int, replicate: int, sort: tuple[int, Checkpointing], share: slice
) -> None:
    found = dict(list(cases(data, replicate, sort).items())[share])
    with RankPool(data * replicate) as pool:
        by_rank = trained_on_ranks(pool, list(found.values()))
    before, after, losses = by_plain_loop(next(iter(found.values())))
    for (name, case), results in zip(found.items(), zip(*by_rank, strict=True), strict=True):
        result = results[0]
        assert distance(result.parameters, after, before) <= BOUND[Precision.FP32], name
        assert result.losses == pytest.approx(losses, rel=1e-3), name
        assert refinement.examine(case.schedule(), whole(results)) == [], name
