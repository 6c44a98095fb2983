"""Conformance tests: every backend must run the same operations, with the same bytes and memory.

Each test compares a trace with values derived from the schedule alone. Durations may differ. A job
that a backend refuses is skipped.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from zsim.backend.backend import Job, load_backend
from zsim.conformance.jobs import NAMES, STEPS, job
from zsim.memory import memory_ledger
from zsim.network.volume import (
    communications,
    element_count,
    is_scalar,
    ring_equivalent_bytes,
)
from zsim.proof import against_trace
from zsim.schedule.issue_order import SETUP, issued
from zsim.schedule.operation import Branch, Free, FreeMode, Previous, StreamOperation, Together
from zsim.schedule.program import Program
from zsim.trace.trace import Event, RankTrace, Trace


@cache
def refusal(backend: str, name: str) -> str | None:
    return load_backend(backend)().refusal(job(name))


@cache
def run(backend: str, name: str) -> tuple[Job, Trace]:
    """One run for all tests."""
    if (reason := refusal(backend, name)) is not None:
        pytest.skip(reason)
    given = job(name)
    return given, load_backend(backend)().run(given, seed=7)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def ranks_of(backend: str, name: str) -> Iterator[tuple[Program, RankTrace]]:
    given, trace = run(backend, name)
    for one in trace.ranks:
        yield given.schedule.program_of(one.rank), one


def on_streams(program: Program) -> Iterator[tuple[int, StreamOperation]]:
    for step, operation in issued(program, STEPS):
        if isinstance(operation, StreamOperation):
            yield step, operation


def test_some_job_is_not_refused_and_a_refusal_is_one_line(backend: str) -> None:
    reasons = [refusal(backend, name) for name in NAMES]
    assert None in reasons
    assert not any("\n" in reason for reason in reasons if reason is not None)


def test_every_rank_is_traced_or_stood_for(backend: str, name: str) -> None:
    given, trace = run(backend, name)
    assert (trace.backend, trace.schedule, trace.seed) == (backend, given.schedule.name, 7)
    assert sum(one.stands_for for one in trace.ranks) == given.schedule.mesh.size
    assert len({one.rank for one in trace.ranks}) == len(trace.ranks)
    for one in trace.ranks:
        assert one.role == given.schedule.role_of(one.rank).name


def test_streams_run_the_same_operations_in_the_same_order(backend: str, name: str) -> None:
    for program, one in ranks_of(backend, name):
        expected: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for step, operation in on_streams(program):
            expected[operation.stream].append((step, operation.id))
        found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for event in one.events:
            found[event.stream].append((event.step, event.operation))
        assert found == expected


def test_communicators_are_handed_the_same_in_the_same_order(backend: str, name: str) -> None:
    given, _ = run(backend, name)
    for program, one in ranks_of(backend, name):
        expected = [
            (step, member.id, member.group, element_count(member), is_scalar(member))
            for step, operation in on_streams(program)
            for member in communications(operation)
        ]
        found = [
            (transfer.step, transfer.operation, transfer.group, transfer.elements, transfer.scalar)
            for transfer in one.transfers
        ]
        assert found == expected
        sizes = {group.name: group.size(given.schedule.mesh) for group in given.schedule.groups}
        assert [transfer.bytes for transfer in one.transfers] == [
            ring_equivalent_bytes(member, sizes[member.group])
            for _, operation in on_streams(program)
            for member in communications(operation)
        ]


def test_the_ledger_is_the_allocators(backend: str, name: str) -> None:
    # "by hand" has a deferred free, whose uses the host has waited for: its return is certain.
    for program, one in ranks_of(backend, name):
        assert one.book == memory_ledger(program, STEPS)


def edges_of(operation: StreamOperation) -> Iterator[tuple[str, bool]]:
    for edge in operation.after:
        if isinstance(edge, Previous):
            yield edge.operation, True
        else:
            yield edge, False


def test_no_operation_starts_before_what_it_waits_for_has_ended(backend: str, name: str) -> None:
    for program, one in ranks_of(backend, name):
        when = {(event.step, event.operation): event for event in one.events}
        for step, operation in on_streams(program):
            event = when[step, operation.id]
            assert event.start_ps <= event.end_ps
            for awaited, previous in edges_of(operation):
                before = latest(when, awaited, step - 1 if previous else step)
                assert before is None or before.end_ps <= event.start_ps, (operation.id, awaited)


def latest(when: dict[tuple[int, str], Event], operation: str, step: int) -> Event | None:
    """The last instance of `operation` in `step` or before; setup has steps' earlier ones."""
    for earlier in range(step, SETUP - 1, -1):
        if (earlier, operation) in when:
            return when[earlier, operation]
    return None


def test_streams_and_communicators_run_one_operation_at_a_time(backend: str, name: str) -> None:
    for program, one in ranks_of(backend, name):
        when = {(event.step, event.operation): event for event in one.events}
        ends: dict[str, int] = {}
        for step, operation in on_streams(program):
            event = when[step, operation.id]
            lines = [f"stream {operation.stream}"]
            if communications(operation):
                lines.append(f"group {communications(operation)[0].group}")
            for line in lines:
                assert ends.get(line, event.start_ps) <= event.start_ps, (operation.id, line)
                ends[line] = event.end_ps


def test_what_happened_is_a_run_that_the_schedule_allows(backend: str, name: str) -> None:
    given, trace = run(backend, name)
    assert against_trace.examine(given.schedule, trace) == []


def test_steps_end_after_everything_in_them(backend: str, name: str) -> None:
    given, trace = run(backend, name)
    assert trace.steps == given.steps == len(trace.step_end_ps)
    assert list(trace.step_end_ps) == sorted(trace.step_end_ps)
    for one in trace.ranks:
        for event in one.events:
            if event.step != SETUP:
                assert event.end_ps <= trace.step_end_ps[event.step]


def test_the_suite_has_every_mode_of_free_and_a_branch() -> None:
    """The jobs cover all free modes and a branch, so a backend that misses one is noticed."""
    operations = [
        operation
        for name in NAMES
        for program in job(name).schedule.programs
        for operation in program.by_id.values()
    ]
    assert {op.mode for op in operations if isinstance(op, Free)} == set(FreeMode)
    assert any(isinstance(op, Branch) for op in operations)
    assert any(isinstance(op, Together) for op in operations)
