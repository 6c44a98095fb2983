"""Wrong schedules of several roles: found by the proof, and without it ended by a clear line."""

import signal
from collections.abc import Callable

import pytest
from faults.schedules import edited
from rank_jobs import strike
from trained_axes import NANOTRON, SMALL_GPT, AxesCase, on

from zsim.backend.backend import RefusedError, RunFailedError
from zsim.proof import check
from zsim.schedule.operation import AllReduce, Operation, PointToPoint, Receive, Send
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim_torch.backend import TorchBackend
from zsim_torch.supervise.process_group import DeviceChoice
from zsim_torch.supervise.rank_failure import RankFailedError
from zsim_torch.supervise.ranks import RankPool

CASE = AxesCase(SMALL_GPT, on(NANOTRON, data=2, pipeline=2))
"""Four ranks, of which two train stage0."""


def of_kind(program: Program, kind: type[PointToPoint]) -> list[PointToPoint]:
    return [each for each in program.step if isinstance(each, kind)]


def with_step(schedule: Schedule, role: str, change: Callable[[Program], Program]) -> Schedule:
    return replace(
        schedule,
        programs=tuple(
            change(program) if program.role == role else program for program in schedule.programs
        ),
    )


def swap(program: Program, one: Operation, other: Operation) -> Program:
    """The program with each of two operations in the place of the other."""
    places = {one.id: other, other.id: one}
    return replace(program, step=tuple(places.get(each.id, each) for each in program.step))


def messages_swapped(schedule: Schedule) -> Schedule:
    """The first stage sends the second micro-batch in place of the first."""

    def change(program: Program) -> Program:
        first, second = of_kind(program, Send)[:2]
        assert isinstance(first, Send)
        assert isinstance(second, Send)
        changed = {
            first.id: replace(first, source=second.source),
            second.id: replace(second, source=first.source),
        }
        return replace(program, step=tuple(changed.get(each.id, each) for each in program.step))

    return with_step(schedule, "stage0", change)


def takes_before_it_sends(schedule: Schedule) -> Schedule:
    """The first stage takes a gradient before it sends what that is made of."""

    def change(program: Program) -> Program:
        first, *_ = of_kind(program, Receive)
        before = program.step[: program.step.index(first)]
        last = [each for each in before if isinstance(each, Send)][-1]
        return swap(program, first, last)

    return with_step(schedule, "stage0", change)


def one_message_less(schedule: Schedule) -> Schedule:
    """The last stage keeps its last gradient."""
    last = of_kind(schedule.programs[-1], Send)[-1].id
    return edited(schedule, lambda each: () if each.id == last else (each,))


def to_another_group(schedule: Schedule) -> Schedule:
    """The first stage sends its first message along the data axis."""
    first = of_kind(schedule.programs[0], Send)[0].id

    def edit(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Send) and each.id == first:
            return (replace(each, group="data"),)
        return (each,)

    return edited(schedule, edit)


def norm_of_a_stage(schedule: Schedule) -> Schedule:
    """The last stage sums the squares of its gradients over its own ranks."""

    def edit(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, AllReduce) and each.group == "world":
            return (replace(each, group="data"),)
        return (each,)

    changed = edited(schedule, edit)
    return replace(schedule, programs=(*schedule.programs[:-1], changed.programs[-1]))


CLIPPED = AxesCase(SMALL_GPT, on(NANOTRON, data=2, pipeline=2, clip_norm=0.1))
MUTANTS: dict[Callable[[Schedule], Schedule], tuple[AxesCase, str]] = {
    messages_swapped: (CASE, "used without memory"),
    takes_before_it_sends: (CASE, "hangs on Gloo, where the host waits: deadlock"),
    one_message_less: (CASE, "no progress for 15 s, last seen: step/"),
    to_another_group: (CASE, "no progress for 15 s, last seen: step/"),
    norm_of_a_stage: (CLIPPED, "no progress for 15 s, last seen: step/"),
}
"""What each is planted in, and part of the line."""


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "mutate",
    [
        each
        if each in (messages_swapped, takes_before_it_sends)
        else pytest.param(each, marks=pytest.mark.long)
        for each in MUTANTS
    ],
)
def test_a_wrong_pipeline_is_refuted_and_without_the_proof_it_ends_in_one_line(
    mutate: Callable[[Schedule], Schedule],
) -> None:
    case, part = MUTANTS[mutate]
    job = case.job()
    wrong = replace(job, schedule=mutate(job.schedule))
    assert check(job.schedule, job.model) == ()
    assert check(wrong.schedule, wrong.model)
    backend = TorchBackend(timeout_s=15, device=DeviceChoice.CPU)
    with pytest.raises((RefusedError, RunFailedError)) as caught:
        backend.run(wrong, seed=0)
    line = str(caught.value)
    assert part in line
    assert "\n" not in line


@pytest.mark.one_commit_in(2)
def test_a_rank_of_a_stage_that_dies_is_told_with_its_role() -> None:
    case = AxesCase(SMALL_GPT, on(NANOTRON, pipeline=2))
    at = "step/forward/mb1/head0/forward0"
    with RankPool(2) as pool, pytest.raises(RankFailedError) as caught:
        pool.run(strike, case.job(), 1, at, signal.SIGKILL, False)
    line = str(caught.value)
    assert f"rank 1: killed by SIGKILL (out of memory, or by hand), last seen: {at}" in line
    assert " in step 1 of stage1; rank 0 waits for step/" in line
    assert " where rank 1 is missing" in line
