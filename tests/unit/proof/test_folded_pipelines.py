"""The order of a pipeline with few micro-batches is right if and only if that of many is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import pytest
from msgspec.structs import replace as changed
from pipeline_tables import pipeline_tables

import zsim
from zsim.backend.backend import Job
from zsim.proof import check
from zsim.schedule.operation import Operation, StreamOperation
from zsim.schedule.schedule import Schedule, ScheduleError

NUMBERS: Final = re.compile(r"/mb\d+|@\d+|/\d+$")
BATCH: Final = re.compile(r"/mb(\d+)")

CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "megatron": (pipeline_tables("megatron", stages=2, micro_batches=12, layers=2), 6, 1),
    "nanotron": (pipeline_tables("nanotron", stages=3, micro_batches=14, layers=3), 7, 1),
    "megatron, interleaved": (
        pipeline_tables(
            "megatron",
            stages=2,
            micro_batches=12,
            layers=4,
            options={"num_virtual_stages_per_pipeline_rank": 2},
        ),
        6,
        2,
    ),
}
"""Tables of a scenario, the number of micro-batches of the short step, and those of a period."""


@cache
def _jobs(case: str) -> tuple[Job, Job]:
    tables, few, _ = CASES[case]
    loaded = zsim.load(tables)
    return loaded.of_micro_batches(few).job(), loaded.job


def _kind(operation: Operation) -> tuple[type[Operation], str]:
    return type(operation), NUMBERS.sub("", operation.id)


@dataclass(frozen=True)
class _Steady:
    """The steady state of a step: places from `begin` to `end`, equal after each `length`."""

    begin: int
    end: int
    length: int

    def alike(self, place: int) -> range:
        """Return all places of the steady state that repeat an operation."""
        return range(self.begin + (place - self.begin) % self.length, self.end, self.length)


def _steady(step: Sequence[Operation], few: int, turn: int) -> _Steady:
    places: dict[int, int] = {}
    for place, operation in enumerate(step):
        match = BATCH.search(operation.id)
        if match is not None:
            places.setdefault(int(match[1]), place)
    begin = end = places[few - 1 - turn]
    length = places[few - 1] - begin
    while end + length < len(step) and _kind(step[end]) == _kind(step[end + length]):
        end += 1
    while begin > 0 and _kind(step[begin - 1]) == _kind(step[begin - 1 + length]):
        begin -= 1
    return _Steady(begin, end + length, length)


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_more_micro_batches_repeats_the_period_of_one_with_few(case: str) -> None:
    (few, many), (_, count, turn) = _jobs(case), CASES[case]
    for program, longer in zip(few.schedule.programs, many.schedule.programs, strict=True):
        short = program.step
        steady = _steady(short, count, turn)
        last = short[steady.end - steady.length : steady.end]
        times = (len(longer.step) - len(short)) // steady.length
        unfolded = [*short[: steady.end], *(last * times), *short[steady.end :]]
        assert [*map(_kind, unfolded)] == [*map(_kind, longer.step)]


EDITS: Final = ("dropped", "later", "free of dependencies")


def _edited(step: Sequence[Operation], places: Sequence[int], edit: str) -> tuple[Operation, ...]:
    """Return a step with the operations at `places` edited."""
    found = list(step)
    for place in sorted(places, reverse=True):
        if edit == "dropped":
            del found[place]
        elif edit == "later" and place + 1 < len(found):
            found[place], found[place + 1] = found[place + 1], found[place]
        elif edit == "free of dependencies" and isinstance(found[place], StreamOperation):
            found[place] = changed(found[place], after=())
    return tuple(found)


def _is_right(schedule: Schedule, role: int, step: tuple[Operation, ...], job: Job) -> bool:
    """Return True if the order of a schedule is right with another step of one role."""

    try:
        programs = list(schedule.programs)
        programs[role] = replace(programs[role], step=step)
        made = replace(schedule, programs=tuple(programs))
    except ScheduleError:
        return False
    return not check(made, job.model, compares=False)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("part", ["fill", "steady state", "drain"])
@pytest.mark.parametrize("case", CASES)
def test_edits_are_found_in_few_micro_batches_as_in_many(case: str, part: str, edit: str) -> None:
    (few, many), (_, count, turn) = _jobs(case), CASES[case]
    verdicts: set[bool] = set()
    for role in {0, len(few.schedule.programs) - 1}:
        short, long = few.schedule.programs[role].step, many.schedule.programs[role].step
        extra = len(long) - len(short)
        steady = _steady(short, count, turn)
        longer = replace(steady, end=steady.end + extra)
        fill, drain = range(steady.begin), range(steady.end, len(short))
        period = range(steady.begin, steady.begin + steady.length)
        span = {"fill": fill, "steady state": period, "drain": drain}[part]
        for place in span[:: max(1, len(span) // 5)]:
            places, others = {
                "fill": ([place], [place]),
                "steady state": (steady.alike(place), longer.alike(place)),
                "drain": ([place], [place + extra]),
            }[part]
            found = _is_right(few.schedule, role, _edited(short, places, edit), few)
            whole = _is_right(many.schedule, role, _edited(long, others, edit), many)
            assert found == whole, (short[place].id, edit)
            verdicts.add(found)
    assert edit != "dropped" or False in verdicts
