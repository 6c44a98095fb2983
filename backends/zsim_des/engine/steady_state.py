"""The periodic part of a simulated pipeline step, from which longer steps follow exactly.

In the steady state of a pipeline every stage repeats the same operations for the next `turn`
micro-batches. The check compares each entry with that of `turn` micro-batches later: all of them
have to start and end later by the same time, the period, on all ranks, for longer than anything is
in flight. Then the state of the simulation at one moment is that of a period later, so the step
with more micro-batches repeats the period. Hosts run ahead, so they may be faster than the period,
but not slower, and they have to wait for the device before the step ends.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.backend.backend import UnsteadyError
from zsim_des.engine.host_issue import Item
from zsim_des.engine.instruction import Stop
from zsim_des.engine.rank import Rank
from zsim_des.engine.stream import ProgramRun

MICRO_BATCH = re.compile(r"/mb(\d+)")
SLOT = re.compile(r"@\d+")


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries that a host issued in a step, in order, with their times.

    `batches` has the micro-batch of each, None for entries of the step. `kinds` has the costs, and
    the name without the numbers of micro-batch and slot.
    """

    kinds: list[object]
    batches: list[int | None]
    slots: list[int]
    streams: list[int]
    issued_ps: list[int]
    starts_ps: list[int]
    ends_ps: list[int]


@dataclass(frozen=True, slots=True)
class Period:
    """A period of one rank.

    Entries from `steady` up to `until` are repeated `length` entries later, and later by exactly
    `period_ps`.
    """

    entries: Entries
    steady: int
    until: int
    length: int
    period_ps: int


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """The periods of all ranks in a step, and a window of one period in which all are steady."""

    periods: list[Period]
    window_ps: tuple[int, int]


def steady_steps(
    ranks: Sequence[Rank], steps: int, micro_batches: int, turn: int
) -> list[SteadyStep]:
    """Return the steady state of each step.

    Raises:
        UnsteadyError: a step is not periodic, or not for long enough.
    """
    runs = [[each.instances[1 + step] for each in ranks] for step in range(steps)]
    found = [_of_step(each, micro_batches, turn) for each in runs]
    _need_hosts(runs, found)
    return found


def _of_step(runs: Sequence[ProgramRun], micro_batches: int, turn: int) -> SteadyStep:
    repeats = [_repeats(_entries(run), micro_batches, turn) for run in runs]
    spans = [each.runs() for each in repeats]
    common = set(spans[0]).intersection(*spans[1:])
    if not common:
        raise UnsteadyError("stages have no period in common")

    def shortest(period_ps: int) -> int:
        return min(each[period_ps][1] - each[period_ps][0] for each in spans)

    period_ps = max(common, key=shortest)
    found = [
        Period(each.entries, *span[period_ps], each.length, period_ps)
        for each, span in zip(repeats, spans, strict=True)
    ]
    begin_ps = _common_ps(found)
    return SteadyStep(found, (begin_ps, begin_ps + period_ps))


def _entries(run: ProgramRun) -> Entries:
    """Return the entries of a step with the times at which the host issued them."""
    if run.memory_wait_ps:
        raise UnsteadyError("a host waits for memory")
    found = Entries([], [], [], [], [], [], [])
    starts, ends = run.starts, run.ends
    for stretch, (begin_ps, _) in zip(run.course.stretches, run.issuing, strict=True):
        for item in stretch.acts:
            if isinstance(item, Item):
                found.issued_ps.append(begin_ps + stretch.offsets_ps[item.order])
                found.slots.append(item.slot)
                what = item.what
                match = MICRO_BATCH.search(what.name)
                name, number = what.name, None
                if match is not None:
                    name, number = name[: match.start()] + name[match.end() :], int(match[1])
                found.kinds.append((SLOT.sub("", name), what.time_ps, what.launch_ps))
                found.batches.append(number)
                found.streams.append(what.stream)
                found.starts_ps.append(starts[item.slot])
                found.ends_ps.append(ends[item.slot])
    return found


@dataclass(frozen=True, slots=True)
class _Repeats:
    """Entries; the part from `since` up to `until` is repeated `length` entries later."""

    entries: Entries
    since: int
    until: int
    length: int

    def runs(self) -> dict[int, tuple[int, int]]:
        """Return by time the longest run of entries that are repeated by that time later.

        The host may issue the repetition earlier than that, but not later.
        """
        entries, length = self.entries, self.length
        issued, starts, ends = entries.issued_ps, entries.starts_ps, entries.ends_ps
        longest: dict[int, tuple[int, int]] = {}
        begin, period_ps = self.since, 0
        for index in range(self.since, self.until):
            later = index + length
            by_ps = starts[later] - starts[index]
            if not ends[later] - ends[index] == by_ps >= issued[later] - issued[index]:
                begin = index + 1
                continue
            if by_ps != period_ps or begin == index:
                begin, period_ps = index, by_ps
            known = longest.get(period_ps, (0, 0))
            if period_ps > 0 and index + 1 - begin > known[1] - known[0]:
                longest[period_ps] = begin, index + 1
        return longest


def _repeats(entries: Entries, micro_batches: int, turn: int) -> _Repeats:
    """Return the entries that are repeated a turn later, around the start of the last one."""
    anchor, length = _anchor(entries, micro_batches, turn)
    kinds, batches = entries.kinds, entries.batches
    last = len(kinds) - length

    def repeats(index: int) -> bool:
        before, after = batches[index], batches[index + length]
        return (
            before is not None
            and after is not None
            and after - before == turn
            and kinds[index] == kinds[index + length]
        )

    since = until = anchor
    while since > 0 and repeats(since - 1):
        since -= 1
    while until < last and repeats(until):
        until += 1
    return _Repeats(entries, since, until, length)


def _anchor(entries: Entries, micro_batches: int, turn: int) -> tuple[int, int]:
    """Return the first entry of the micro-batch one turn before the last, and the distance."""
    kinds, batches = entries.kinds, entries.batches
    try:
        later = batches.index(micro_batches - 1)
        first = batches.index(micro_batches - 1 - turn)
    except ValueError:
        raise UnsteadyError("a stage has no entries of a micro-batch") from None
    if kinds[first] != kinds[later]:
        raise UnsteadyError("micro-batches start with different operations")
    return first, later - first


def _common_ps(found: Sequence[Period]) -> int:
    """Return a time at which all ranks are steady, and were when the work in flight started.

    It is the longest entry after all streams have become steady: what is in flight then began
    when they were. Another such time later, speeds of shared links are known to repeat as well.

    Raises:
        UnsteadyError: there is none.
    """
    spans = [
        (entries.streams[at], entries.starts_ps[at], entries.ends_ps[at], rank)
        for rank, each in enumerate(found)
        for entries in (each.entries,)
        for at in range(each.steady, each.until)
    ]
    begun: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], int] = {}
    for stream, start_ps, end_ps, rank in spans:
        begun.setdefault((rank, stream), start_ps)
        ended[rank, stream] = end_ps
    since_ps = max(begun.values())
    longest_ps = max(
        (end_ps - start_ps for _, start_ps, end_ps, _ in spans if end_ps > since_ps), default=0
    )
    if min(ended.values()) - since_ps < 2 * longest_ps or not longest_ps:
        raise UnsteadyError("the steady state is too short")
    _need_alone(found, since_ps, since_ps + longest_ps + found[0].period_ps)
    return since_ps + longest_ps


def _need_alone(found: Sequence[Period], begin_ps: int, end_ps: int) -> None:
    """Raise UnsteadyError if work that does not repeat is in flight between two times.

    A gather of the fill, for example, would slow the messages of the first periods alone.
    """
    for each in found:
        entries, rest = each.entries, each.until + each.length
        for index in (*range(each.steady), *range(rest, len(entries.slots))):
            if entries.ends_ps[index] > begin_ps and entries.starts_ps[index] < end_ps:
                raise UnsteadyError("other work overlaps the steady state")


def _need_hosts(runs: Sequence[Sequence[ProgramRun]], found: Sequence[SteadyStep]) -> None:
    """Raise UnsteadyError if more micro-batches would find a host at another distance.

    A host that is faster than the period is further ahead of the device after more of them. That
    changes nothing if the device waits for no host until the host has waited for the device.
    """
    for rank in range(len(runs[0])):
        is_ahead = False
        for step, each in enumerate(found):
            period, run = each.periods[rank], runs[step][rank]
            if is_ahead and _is_awaited(run, period.entries, range(period.steady)):
                raise UnsteadyError("the device waits for a host at the start of a step")
            entries, length = period.entries, period.length
            is_ahead = any(
                entries.issued_ps[index + length] - entries.issued_ps[index] < period.period_ps
                for index in range(period.steady, period.until)
            )
            rest = range(period.until + length, len(entries.slots))
            if is_ahead and _is_awaited(run, entries, rest):
                raise UnsteadyError("the device waits for a host after the steady state")
            is_ahead = is_ahead and _blocked_ps(run, _issued_at(entries, rest)) is None


def _is_awaited(run: ProgramRun, entries: Entries, part: range) -> bool:
    """Return True if the device waits for the host in `part`, before the host waits for it."""
    blocked_ps = _blocked_ps(run, _issued_at(entries, part))
    return any(
        entries.starts_ps[index] <= entries.issued_ps[index]
        and (blocked_ps is None or entries.issued_ps[index] < blocked_ps)
        for index in part
    )


def _issued_at(entries: Entries, part: range) -> int:
    """Return when the host issued what precedes `part`."""
    return entries.issued_ps[part.start - 1] if part.start else 0


def _blocked_ps(run: ProgramRun, since_ps: int) -> int | None:
    """Return when the host, after `since_ps`, first waits until the device has caught up."""
    waits = zip(run.course.stretches, run.issuing, run.issuing[1:], strict=False)
    for stretch, (_, end_ps), (begin_ps, _) in waits:
        if isinstance(stretch.stop, Stop) and end_ps >= since_ps and begin_ps > end_ps:
            return end_ps
    return None
