"""Schedules of other runtimes train on real ranks as one process does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from emulated_strategies import EMULATED, strategy
from tiny_training import BOUND, Case, Result, all_by_schedule, by_plain_loop, distance

from zsim.proof import against_trace as refinement
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Checkpointing
from zsim.trace.trace import Trace
from zsim_torch.supervise.ranks import RankPool

ONE = (1, Checkpointing.FULL)
TWO = (2, Checkpointing.NONE)
"""Micro-batches of a step, and what forward keeps."""


def cases(
    data: int, replicate: int, sorts: tuple[tuple[int, Checkpointing], ...]
) -> dict[str, Case]:
    """Every runtime."""
    found: dict[str, Case] = {}
    for name, named in EMULATED.items():
        for micro_batches, checkpointing in sorts:
            made = strategy(
                named,
                data=data,
                replicate=replicate,
                micro_batches=micro_batches,
                checkpointing=checkpointing,
                clip_norm=0.1,
            )
            if made is not None:
                found[f"{name}, {micro_batches} micro-batches"] = Case(made, steps=3, witness=True)
    return found


def whole(results: Sequence[Result]) -> Trace:
    """One trace of what every rank saw of itself."""
    traces = [result.trace for result in results]
    ranks = tuple(rank for trace in traces for rank in trace.ranks)
    ends = zip(*(trace.step_end_ps for trace in traces), strict=True)
    return replace(traces[0], ranks=ranks, step_end_ps=tuple(max(each) for each in ends))


@pytest.mark.parametrize(
    ("data", "replicate", "sorts"),
    [
        (1, 1, (TWO,)),
        (2, 1, (ONE, TWO)),
        (3, 1, (ONE,)),
        (4, 1, (TWO,)),
        (2, 2, (ONE, TWO)),
        pytest.param(1, 1, (ONE,), marks=pytest.mark.long),
        pytest.param(3, 1, (TWO,), marks=pytest.mark.long),
        pytest.param(4, 1, (ONE,), marks=pytest.mark.long),
    ],
)
def test_every_runtime_trains_as_one_process_does(
    data: int, replicate: int, sorts: tuple[tuple[int, Checkpointing], ...]
) -> None:
    found = cases(data, replicate, sorts)
    with RankPool(data * replicate) as pool:
        by_rank = pool.run(all_by_schedule, list(found.values()))
    plain = {
        micro_batches: by_plain_loop(case)
        for case in found.values()
        for micro_batches in [case.strategy.train.gradient_accumulation_steps]
    }
    for (name, case), results in zip(found.items(), zip(*by_rank, strict=True), strict=True):
        result = results[0]
        before, after, losses = plain[case.strategy.train.gradient_accumulation_steps]
        assert distance(result.parameters, after, before) <= BOUND[Precision.FP32], name
        assert result.losses == pytest.approx(losses, rel=1e-3), name
        assert refinement.examine(case.schedule(), whole(results)) == [], name
