"""Refinement: a trace is one of the executions that the schedule allows.

Proved for every traced rank, for setup and all steps: it ran exactly the operations of its
program, once each, on their streams and in their order; its communicators got the operations of
the program, in the order of the host; nothing started before its dependencies had ended
(`traced_time`); the host could have written the allocator's log (`traced_ledger`), which stays
within the promised peak. Proved for all ranks together: each role has its number of ranks, all
took the same list of every branch, steps end after their operations, and clocks can be set so that
no data arrived before its transfer had started (`traced_clocks`).

This is a rank's own report. With witnesses (`zsim.trace.witness`), memory, accesses and
collectives are compared as torch saw them (`witnessed_memory`, `witnessed_elements`,
`witnessed_collectives`); without, `proved_properties` lists them as not shown. Durations are not
checked. The cost is linear in the length of the trace; for clocks, at worst times the number of
ranks.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from zsim.memory import peak_bytes
from zsim.network.volume import (
    communications,
    element_count,
    is_scalar,
    ring_equivalent_bytes,
)
from zsim.proof.finding import Finding
from zsim.proof.sequence_diff import (
    Difference,
    Differs,
    Disordered,
    Item,
    Missing,
    Unexpected,
    differences,
)
from zsim.proof.traced_clocks import impossible
from zsim.proof.traced_ledger import TracedLedger, found
from zsim.proof.traced_rank import Instance, TracedRank, in_words, refuted
from zsim.proof.traced_time import Times
from zsim.proof.witnessed_collectives import flights, handed_over, kept, matched
from zsim.proof.witnessed_elements import moved
from zsim.proof.witnessed_memory import lifetimes, touched
from zsim.proof.witnessed_rank import WitnessedRank
from zsim.schedule.issue_order import SETUP
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace

SHOWN = 8
"""Maximum number of lines that a finding shows of each of two orders."""


def examine(schedule: Schedule, trace: Trace) -> list[Finding]:
    """Find everything in which `trace` is not an execution of `schedule`."""
    result = [*_head(schedule, trace)]
    if result:
        return result
    ranks = [TracedRank(schedule.program_of(one.rank), one, trace.steps) for one in trace.ranks]
    times = [Times(rank) for rank in ranks]
    result += _uniform(ranks)
    for rank, timed in zip(ranks, times, strict=True):
        result += _events(rank)
        result += _times(rank, timed, trace)
        result += _transfers(schedule, rank)
        result += _ledger(schedule, rank)
    result += _clocks(schedule, ranks, times)
    result += _witnesses(schedule, ranks)
    return result


def proved_properties(
    trace: Trace, found: Sequence[Finding]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the properties proved of the run of `trace`, and those not shown."""
    total = sum(one.stands_for for one in trace.ranks)
    ranks = f"{total} rank{'s' if total > 1 else ''}"
    unseen = [str(one.rank) for one in trace.ranks if one.witness is None]
    if not unseen:
        return (() if found else (f"run ({ranks}, by witnesses)",)), ()
    where = (
        "the trace" if len(unseen) == len(trace.ranks) else f"the trace of rank {', '.join(unseen)}"
    )
    not_shown = f"what the run did beyond its own word: no witnesses in {where}"
    return (() if found else (f"run ({ranks}, as it says itself)",)), (not_shown,)


def _witnesses(schedule: Schedule, ranks: Sequence[TracedRank]) -> Iterator[Finding]:
    """Compare torch's recorded behaviour with the schedule, on ranks with a witness."""
    seen: list[WitnessedRank] = []
    for rank in ranks:
        if rank.trace.witness is None:
            continue
        cut = WitnessedRank.of(schedule, rank, rank.trace.witness)
        if isinstance(cut, Finding):
            yield cut
            continue
        seen.append(cut)
        for family in (lifetimes, touched, moved, handed_over, flights, kept):
            yield from family(cut)
    yield from matched(seen)


def _head(schedule: Schedule, trace: Trace) -> Iterator[Finding]:
    """Check that the trace has the ranks of the schedule, without which no other check applies."""
    size = schedule.mesh.size
    if any(one.rank not in range(size) for one in trace.ranks):
        worst = max(trace.ranks, key=lambda one: abs(one.rank)).rank
        yield refuted("trace/ranks", f"rank {worst} is traced, the schedule has {size}")
        return
    for rank, count in Counter(one.rank for one in trace.ranks).items():
        if count > 1:
            yield refuted("trace/ranks", f"rank {rank} is traced {count} times")
    stands: Counter[str] = Counter()
    for one in trace.ranks:
        role = schedule.role_of(one.rank).name
        stands[role] += one.stands_for
        if one.role != role:
            why = f"rank {one.rank} has role {one.role!r}, the schedule gives it {role!r}"
            yield refuted("trace/ranks", why)
        if one.stands_for < 1:
            yield refuted("trace/ranks", f"rank {one.rank} stands for {one.stands_for} ranks")
    for each in schedule.roles:
        has, counted = each.size(schedule.mesh), stands[each.name]
        if counted != has:
            why = f"role {each.name} has {has} ranks, the trace speaks of {counted}"
            yield refuted("trace/ranks", why)


def _uniform(ranks: Sequence[TracedRank]) -> Iterator[Finding]:
    """Check that all ranks that run a branch take the same list of it."""
    took: dict[Instance, dict[bool, str]] = {}
    for rank in ranks:
        for each in rank.outcomes:
            took.setdefault((each.step, each.branch), {}).setdefault(each.then, rank.name)
            if each.torn:
                why = f"in step {each.step} operations of both its lists run"
                yield refuted(each.branch, why, role=rank.name)
    for (step, branch), by_side in took.items():
        if len(by_side) > 1:
            lines = [f"{by_side[True]} takes then", f"{by_side[False]} takes otherwise"]
            yield refuted(branch, f"ranks take different lists of it in step {step}", *lines)


def _events(rank: TracedRank) -> Iterator[Finding]:
    """Check the operations of each stream, and their order."""
    expected: dict[str, list[Item]] = {}
    for step, operation in rank.entries:
        expected.setdefault(operation.stream, []).append(((step, operation.id), None))
    there: dict[str, list[Item]] = {}
    for event in rank.trace.events:
        there.setdefault(event.stream, []).append(((event.step, event.operation), None))
    belongs = {key: stream for stream, items in expected.items() for key, _ in items}
    astray = {
        key: stream
        for stream, items in there.items()
        for key, _ in items
        if belongs.get(key, stream) != stream
    }
    for stream in dict.fromkeys([*expected, *there]):
        for each in differences(expected.get(stream, []), there.get(stream, [])):
            if isinstance(each, Missing) and each.key in astray:
                continue  # another finding names the stream on which it ran
            yield _ran_otherwise(rank, stream, each, belongs)


def _ran_otherwise(
    rank: TracedRank, stream: str, each: Difference, belongs: Mapping[Hashable, str]
) -> Finding:
    match each:
        case Disordered():
            return _disorder(rank, each, f"stream {stream}")
        case Missing(key=(int(step), str(name))):
            why = f"did not run{_in(step)}"
        case Unexpected(key=(int(step), str(name)) as key):
            why = f"ran{_in(step)}, where the schedule does not have it"
            if belongs.get(key) == stream:
                why = f"ran more than once{_in(step)}"
            elif key in belongs:
                why = f"ran on stream {stream}{_in(step)}, its stream is {belongs[key]}"
        case _:
            raise AssertionError(each)
    return refuted(name, why, role=rank.name)


def _in(step: int) -> str:
    return " in setup" if step == SETUP else f" in step {step}"


def _disorder(rank: TracedRank, each: Disordered, where: str) -> Finding:
    """Return a finding that names the first operation out of order, with both orders."""
    name = str(_names(each.found)[0])
    lines = [f"the schedule: {each_name}" for each_name in _names(each.expected)[:SHOWN]]
    lines += [f"the trace: {each_name}" for each_name in _names(each.found)[:SHOWN]]
    return refuted(name, f"{where} has another order than the schedule", *lines, role=rank.name)


def _names(keys: Sequence[object]) -> list[str]:
    return [str(key[1]) if isinstance(key, tuple) else str(key) for key in keys]


def _times(rank: TracedRank, timed: Times, trace: Trace) -> Iterator[Finding]:
    """Check that nothing ends before it starts, or starts too early, and that steps end last."""
    for event in rank.trace.events:
        if event.end_ps < event.start_ps:
            lines = f"starts at {event.start_ps} ps", f"ends at {event.end_ps} ps"
            why = f"ends before it starts{_in(event.step)}"
            yield refuted(event.operation, why, *lines, role=rank.name)
        known = 0 <= event.step < trace.steps
        if known and event.end_ps > trace.step_end_ps[event.step]:
            why = f"ends after step {event.step}, which ends at {trace.step_end_ps[event.step]} ps"
            yield refuted(event.operation, why, f"ends at {event.end_ps} ps", role=rank.name)
    for early in timed.early:
        floor, (step, name) = early.floor, early.instance
        assert floor.which is not None
        event = rank.events[early.instance]
        at, time_ps = ("ends", event.end_ps) if early.ended else ("starts", event.start_ps)
        yield refuted(
            name,
            f"{at}{_in(step)} before {in_words(floor.which)} has ended, which it waits for",
            f"{at} at {time_ps} ps",
            f"{in_words(floor.which)} ends at {floor.time_ps} ps: {floor.why}",
            role=rank.name,
        )


def _transfers(schedule: Schedule, rank: TracedRank) -> Iterator[Finding]:
    """Check the operations given to communicators, in the order of the host."""
    sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
    expected: list[Item] = [
        (
            (step, member.id),
            (
                member.group,
                member.name,
                element_count(member),
                ring_equivalent_bytes(member, sizes[member.group]),
                is_scalar(member),
            ),
        )
        for step, operation in rank.entries
        for member in communications(operation)
    ]
    there: list[Item] = [
        (
            (each.step, each.operation),
            (each.group, each.collective, each.elements, each.bytes, each.scalar),
        )
        for each in rank.trace.transfers
    ]
    for each in differences(expected, there):
        yield _otherwise(rank, each, "transfer", ("group", "kind", "elements", "bytes", "scalar"))


def _ledger(schedule: Schedule, rank: TracedRank) -> Iterator[Finding]:
    """Check the allocator's log, and its peak against the promise."""
    ledger = TracedLedger(rank)
    for each in differences(ledger.expected, found(rank.trace.book)):
        yield _otherwise(rank, each, "line of the book", ("pool", "kind", "bytes"))
    for early in ledger.too_early:
        step, operation, buffer, _ = early.key
        yield refuted(
            operation,
            f"books {buffer} back{_in(step)} before {in_words(early.use)}, a use of it, had ended",
            f"freed by {in_words(early.free)}, deferred",
            role=rank.name,
        )
    for role, pool, promised in schedule.contract.peak_bytes:
        if role == rank.trace.role and (peak := peak_bytes(rank.trace.book, pool)) > promised:
            why = f"the book of the trace reaches {peak} bytes, promised are {promised}"
            yield refuted(pool, why, role=rank.name)


def _otherwise(rank: TracedRank, each: Difference, what: str, words: tuple[str, ...]) -> Finding:
    """Return a finding about a difference between a line of the log and the schedule."""
    match each:
        case Missing(key=(int(step), str(name), *rest)):
            why = f"its {what}{_of(rest)}{_in(step)} is missing"
        case Unexpected(key=(int(step), str(name), *rest)):
            why = f"a {what}{_of(rest)}{_in(step)} that the schedule does not have"
        case Differs(key=(int(step), str(name), *rest), expected=tuple(ours), found=tuple(theirs)):
            unlike = [
                f"{word} {there}, the schedule says {expected}"
                for word, expected, there in zip(words, ours, theirs, strict=True)
                if expected != there
            ]
            why = f"its {what}{_of(rest)}{_in(step)} has {', '.join(unlike)}"
        case Disordered():
            return _disorder(rank, each, f"{what}s:")
        case _:
            raise AssertionError(each)
    return refuted(name, why, role=rank.name)


def _of(rest: Sequence[object]) -> str:
    """Return text that names the buffer of a line, and whether it was allocated or freed."""
    if not rest:
        return ""
    buffer, frees = rest
    return f" of {buffer}, {'freed' if frees else 'allocated'},"


def _clocks(
    schedule: Schedule, ranks: Sequence[TracedRank], times: Sequence[Times]
) -> Iterator[Finding]:
    cycle = impossible(schedule, ranks, times)
    if cycle is not None:
        taker, taken, _, _ = cycle.steps[0]
        lines = [
            f"{one} ends {in_words(ended)} before {other} can have begun {in_words(begun)}"
            for one, ended, other, begun in cycle.steps
        ]
        why = "ends before its partners can have begun it, however their clocks are set"
        yield refuted(taken[1], why, *lines, role=taker)
