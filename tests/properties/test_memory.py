"""No book of a run, whatever its timing, is above what is proved of all of them."""

from collections.abc import Iterable

import pytest
from drawn import jobs
from drawn_examples import examples
from drawn_timings import DrawnTiming, timings
from exact_training import cluster
from faults.schedules import edited
from hypothesis import given
from hypothesis import strategies as st

from zsim.backend.backend import Job
from zsim.memory import peak_bytes
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Free, FreeMode, Operation
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_des import SimBackend

STEPS = 3


def deferred(made: Schedule, chosen: set[int]) -> Schedule:
    """Every free in the step that waits for something and whose turn is in `chosen`, deferred."""
    turn = iter(range(10**6))

    def edit(operation: Operation) -> Iterable[Operation]:
        if isinstance(operation, Free) and operation.uses and next(turn) % 5 in chosen:
            return (replace(operation, mode=FreeMode.DEFERRED),)
        return (operation,)

    return edited(made, edit)


@pytest.mark.one_commit_in(6)
@examples(60)
@given(
    jobs(max_data=2, max_tensor=1),
    st.sets(st.integers(0, 4)),
    st.sets(st.integers(0, STEPS - 1)),
    timings(),
)
def test_no_timing_brings_a_book_above_the_peak_that_is_proved(
    job: tuple[Model, Strategy], chosen: set[int], overflow: set[int], timing: DrawnTiming
) -> None:
    model, strategy = job
    made = deferred(make_schedule(*job), chosen)
    overflows = (
        frozenset(overflow) if strategy.train.precision is Precision.FP16 else frozenset[int]()
    )
    backend = SimBackend(unfold=True, overflow_steps=overflows, durations=timing)
    work = Job(schedule=made, model=model, cluster=cluster(strategy.ranks), steps=STEPS)
    trace = backend.run(work, seed=0)
    peak = max(peak_bytes(rank.book, "device") for rank in trace.ranks)
    contract = replace(made.contract, peak_bytes=(("all", "device", peak - 1),))
    found = check(replace(made, contract=contract), model)
    assert "memory" in {finding.invariant for finding in found}
