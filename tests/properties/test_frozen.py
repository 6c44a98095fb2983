"""Schedules with frozen parameters are proved, train what plain training does, and hold no more."""

import pytest
from drawn_frozen import frozen_emulated_jobs, frozen_jobs
from drawn_timings import DrawnTiming, timings
from exact_training import STEPS, trains
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from zsim.model.model import Model
from zsim.proof import check, prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, AllReduce, Compute, ReduceScatter, Role
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy

Job = tuple[Model, Strategy]
any_jobs = st.one_of(frozen_jobs(), frozen_emulated_jobs())
often = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.mark.one_commit_in(12)
@often
@given(any_jobs)
def test_every_drawn_schedule_with_frozen_parameters_is_proved(job: Job) -> None:
    assert check(make_schedule(*job), job[0]) == ()


@pytest.mark.one_commit_in(9)
@often
@given(any_jobs.filter(lambda job: job[1].parallel.tensor == 1))
def test_it_is_proved_too_where_the_schedule_alone_is_known(job: Job) -> None:
    # In a layout, parameters without elements stand in one place: which is trained cannot be told.
    assume(all(parameter.elements for parameter in job[0].parameters))
    proof = prove(make_schedule(*job))
    assert proof.findings == ()


@pytest.mark.one_commit_in(24)
@settings(often, max_examples=25)
@given(any_jobs, timings(), st.frozensets(st.integers(0, STEPS - 1), max_size=2))
def test_it_trains_what_plain_data_parallelism_does(
    job: Job, timing: DrawnTiming, overflow_steps: frozenset[int]
) -> None:
    trains(*job, timing, overflow_steps)


@pytest.mark.one_commit_in(6)
@often
@given(any_jobs)
def test_frozen_parameters_have_no_state_and_no_gradient(job: Job) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    pieces = {layout.name: {each.parameter for each in layout.pieces} for layout in made.layouts}
    (program,) = made.programs

    def holds_frozen(name: str) -> bool:
        layout = program.by_name[name].layout
        return layout is not None and not model.frozen.isdisjoint(pieces[layout])

    states = (Kind.MASTER, Kind.MOMENT, Kind.GRADIENT)
    assert not [each for each in program.buffers if each.kind in states and holds_frozen(each.name)]
    for operation in program.by_id.values():
        match operation:
            case AllReduce(source=view) | ReduceScatter(source=view):
                assert not holds_frozen(view.buffer)
            case Compute(action=Action.UPDATE | Action.NORM | Action.FINITE, operands=operands):
                assert not any(holds_frozen(each.view.buffer) for each in operands)
            case Compute(action=Action.BACKWARD, operands=operands):
                made_of = [each for each in operands if each.role is Role.GRADIENT]
                assert not any(holds_frozen(each.view.buffer) for each in made_of)
            case _:
                pass
