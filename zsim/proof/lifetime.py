"""Lifetime: memory is used between its allocation and its free, and is free when it is reused.

Proved for every role, every step and every path through the branches, from host order and
happens-before (`zsim.schedule.happens_before`):

* every access to a buffer is issued between its `Allocate` and its `Free`, one free each;
* every use on a stream other than the home stream has finished when the home stream (deferred: the
  allocator) gets the memory back: it is in `Free.uses`, or ordered before the free by other means;
* *reuse*: every use on a stream other than the home stream is ordered after everything on the home
  stream when the buffer was allocated, since that may still use the same block;
* after setup and after every step exactly the persistent buffers are alive, whichever lists of
  branches were taken.

Together with `races`, which orders the accesses to one buffer, this orders all accesses to a block
of memory, whichever buffers it holds in turn.

Assumed: a block returns to the home stream of its buffer, as in PyTorch's allocator.

Cost: a regular expression for each buffer that is used only on its home stream. For others, linear
in the operations that name them, for each path through the branches. Twice if a first pass,
without knowledge of earlier steps, does not suffice.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator

from zsim.proof.context import SETUP, STEP, Context, NumberedProgram
from zsim.proof.finding import Finding
from zsim.schedule.happens_before import NEVER, BranchPath, Timeline
from zsim.schedule.operation import Free
from zsim.schedule.program_index import ALLOCATE, FREE, HOST, History, Numbered

INVARIANT = "lifetime"

TRANSIENT = re.compile(rb"(?:A[^AF]*F)*").fullmatch
"""The history of a buffer that is repeatedly allocated and freed."""
TAKEN = re.compile(rb"A[^AF]*").fullmatch
"""The history of a persistent buffer in setup."""


def examine(context: Context) -> list[Finding]:
    """Find every breach of lifetime in any role."""
    return [finding for each in context.programs for finding in _examine_program(each)]


def _examine_program(each: NumberedProgram) -> list[Finding]:
    role = each.program.role
    if each.crowded:
        return [
            Finding(
                invariant=INVARIANT,
                role=role,
                operation=part,
                why=f"its branches have {ways} outcomes, more than are gone through",
            )
            for part, ways in each.crowded.items()
        ]
    persistent = set(each.program.persistent)
    found = _examine_part(each, SETUP, each.setup_order, set())
    return found + each.proved(lambda order: _examine_part(each, STEP, order, persistent))


def _examine_part(
    each: NumberedProgram, part: str, order: Timeline, alive: set[str]
) -> list[Finding]:
    """Find breaches in setup, or in a step at whose start the buffers `alive` are alive."""
    numbered = order.numbered
    found = _Found(each, part, numbered)
    for name in each.program.persistent:
        if name not in alive and name not in numbered.history:
            found.end(name, None)
    first, *others = order.paths
    fork = min(numbered.sides, default=len(numbered.operations))
    for name, history in numbered.history.items():
        if not history.away and history.numbers[-1] < fork:
            codes = history.codes
            if name not in found.persistent:
                fine = TRANSIENT(codes) is not None
            elif name in alive:
                fine = ALLOCATE not in codes and FREE not in codes
            else:
                fine = TAKEN(codes) is not None
            if fine:
                continue
        _follow(found, first, name, was_alive=name in alive)
        for path in others:
            if path.since <= history.numbers[-1]:
                _follow(found, path, name, was_alive=name in alive)
    return found.in_order()


PERSISTENT, REPORTED = -1, -2
"""In place of the number of an `Allocate`: alive from before; not alive but already reported."""


def _carried(history: History, numbered: Numbered) -> tuple[int, dict[int, int]]:
    """Return the uses that the next step knows of a buffer left alive by this one.

    These are the last entry of the home stream at its allocation, and the last use on each other
    stream.
    """
    tail, last = NEVER, dict[int, int]()
    for number, code in zip(history.numbers, history.codes, strict=True):
        stream = numbered.stream[number]
        if code == ALLOCATE:
            entries = numbered.entries[history.home]
            tail, last = bisect_left(entries, number) - len(entries), {}
        elif stream not in (HOST, history.home):
            last[stream] = numbered.position[number] - len(numbered.entries[stream])
    return (NEVER, {}) if tail == NEVER else (tail, last)


def _follow(found: "_Found", path: BranchPath, name: str, *, was_alive: bool) -> None:
    """Follow the history of one buffer on one path, and record what breaks a rule."""
    numbered = path.numbered
    history = numbered.history[name]
    home, known_at = history.home, path.known
    allocated: int | None = None
    tail = NEVER
    last: dict[int, int] = {}  # many times faster than dict[int, int]()
    if was_alive:
        allocated = PERSISTENT
        tail, last = _carried(history, numbered)
    for number, code in zip(history.numbers, history.codes, strict=True):
        known = known_at[number]
        if known is None:
            continue
        if code == ALLOCATE:
            if allocated not in (None, REPORTED):
                found.twice(number, name, allocated)
            allocated, tail, last = number, path.tail(home, number), {}
            continue
        if code == FREE:
            if allocated is None:
                found.freed_dead(number, name)
            else:
                for stream, position in last.items():
                    if known[stream] < position:
                        found.still_used(number, stream, position)
            allocated = None
            continue
        if allocated is None:
            found.dead(number, name)
            allocated, tail, last = REPORTED, NEVER, {}
        stream = numbered.stream[number]
        if stream not in (HOST, home):
            if known[home] < tail:
                found.reused(number, name, allocated, tail, known=known[home])
            last[stream] = numbered.position[number]
    found.end(name, allocated)


class _Found:
    """Collects the findings of one part, each fault once."""

    def __init__(self, each: NumberedProgram, part: str, numbered: Numbered) -> None:
        self.program = each.program
        self.part = part
        self.numbered = numbered
        self.persistent = set(each.program.persistent)
        self._findings: dict[tuple[str, str], tuple[int, Finding]] = {}

    def in_order(self) -> list[Finding]:
        """Return the findings in the order of the operations."""
        return [finding for _, finding in sorted(self._findings.values(), key=lambda each: each[0])]

    def end(self, name: str, allocated: int | None) -> None:
        """Check buffer `name` at the end of the part; it is alive since `allocated`, or dead."""
        persistent = name in self.persistent
        if persistent and allocated is None:
            number = len(self.numbered.operations)
            why = f"{name} is persistent, and not alive when {self.part} ends"
            self._note_at(number, self.part, why, self._before(number, name))
        elif not persistent and allocated is not None and allocated != REPORTED:
            why = f"allocates {name}, which is alive when {self.part} ends and not freed"
            self._note(allocated, why, ("it is not among the persistent buffers",))

    def twice(self, number: int, name: str, allocated: int | None) -> None:
        """Record an allocation of a buffer that is alive."""
        why = f"allocates {name}, which is alive: no free gives the first memory back"
        self._note(number, why, self._since(name, allocated))

    def freed_dead(self, number: int, name: str) -> None:
        """Record a free of a buffer that is not alive."""
        why = f"frees {name}, which is not alive"
        self._note(number, why, self._before(number, name))

    def dead(self, number: int, name: str) -> None:
        """Record a use outside the lifetime."""
        before = self._before(number, name)
        state = "after it was freed" if before else "before it is allocated"
        numbered = self.numbered
        history = numbered.history[name]
        others = [
            f"{numbered.operations[other].id} uses it too"
            for other, code in zip(history.numbers, history.codes, strict=True)
            if other > number and code not in (ALLOCATE, FREE)
        ]
        witness = (*before, f"{numbered.operations[number].id} uses {name}", *others[:4])
        self._note(number, f"uses {name} {state}", witness)

    def reused(
        self, number: int, name: str, allocated: int | None, tail: int, *, known: int
    ) -> None:
        """Record a use that may come before the home stream has stopped using the memory."""
        numbered = self.numbered
        home, stream = numbered.home[name], numbered.stream[number]
        holder, user = self._entry(home, tail), numbered.operations[number].id
        why = (
            f"reuse: uses {name} on {numbered.streams[stream]} unordered after what "
            f"{numbered.streams[home]} held when the memory was taken"
        )
        witness = (
            *self._since(name, allocated),
            f"{holder} was on {numbered.streams[home]} by then and may still use that memory",
            f"what {user} has waited for there ends with {self._entry(home, known)}",
        )
        self._note(number, why, witness)

    def still_used(self, number: int, stream: int, position: int) -> None:
        """Record a free that does not wait for a use."""
        free, user = self.numbered.operations[number], self._entry(stream, position)
        assert isinstance(free, Free)
        why = f"gives {free.buffer} back while {user} may still use it"
        witness = (
            f"{user} uses {free.buffer} on {self.numbered.streams[stream]}",
            f"{free.id} waits for {', '.join(free.uses) or 'nothing'}",
            f"name it in uses, or let {self.program.by_name[free.buffer].home} wait for it before",
        )
        self._note(number, why, witness)

    def _entry(self, stream: int, position: int) -> str:
        if position <= 0:
            return "an operation of an earlier step" if position > NEVER else "nothing"
        return self.numbered.operations[self.numbered.entries[stream][position - 1]].id

    def _since(self, buffer: str, allocated: int | None) -> tuple[str, ...]:
        if allocated is None or allocated < 0:
            return (f"{buffer} is alive since an earlier step",)
        return (f"{self.numbered.operations[allocated].id} took memory for {buffer}",)

    def _before(self, number: int, buffer: str) -> tuple[str, ...]:
        """Return the last free of `buffer` before `number`, if any."""
        history = self.numbered.history.get(buffer)
        frees: Iterator[int] = iter(())
        if history is not None:
            numbers = zip(history.numbers, history.codes, strict=True)
            frees = (each for each, code in numbers if code == FREE and each < number)
        last = max(frees, default=None)
        return () if last is None else (f"{self.numbered.operations[last].id} frees {buffer}",)

    def _note(self, number: int, why: str, witness: tuple[str, ...]) -> None:
        self._note_at(number, self.numbered.operations[number].id, why, witness)

    def _note_at(self, number: int, where: str, why: str, witness: tuple[str, ...]) -> None:
        finding = Finding(
            invariant=INVARIANT, role=self.program.role, operation=where, why=why, witness=witness
        )
        self._findings.setdefault((where, why), (number, finding))
