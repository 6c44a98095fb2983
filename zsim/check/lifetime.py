"""Lifetime: memory is used between its allocation and its free, and is free when it is reused.

Proved for every role, every step and every way through the branches, from host order and
happens-before (`zsim.order`):

* every access to a buffer is issued between its `Allocate` and its `Free`, one free each;
* every use on a stream other than the home stream has finished when the home stream (deferred: the
  allocator) takes the memory back: it is in `Free.uses`, or ordered before the free by other means;
* *reuse*: every use on a stream other than the home stream is ordered after all that the home
  stream held when the buffer was allocated, since that may still use the same block;
* after setup and after every step exactly the persistent buffers are alive, and both lists of a
  branch leave the same buffers alive.

Assumed: a block returns to the home stream of its buffer, as in PyTorch's allocator. Not examined:
whether two accesses that are both in time race with each other.

Cost: one look at each buffer that an operation names; twice where a first pass, with nothing known
of the steps before, does not suffice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.check.finding import Finding
from zsim.check.subject import NumberedProgram, Subject
from zsim.numbered import HOST, Numbered
from zsim.operation import Allocate, Branch, Free, Operation
from zsim.order import (
    NEVER,
    OUTCOMES_MAX,
    Clock,
    Entry,
    Stretch,
    Timeline,
    drained,
    outcomes,
    unknown,
)
from zsim.schedule import Program

INVARIANT = "lifetime"
SETUP, STEP = "setup", "step"


def examine(subject: Subject) -> list[Finding]:
    """Every breach of lifetime in any role."""
    return [finding for each in subject.programs for finding in _examine_program(each)]


def _examine_program(numbered: NumberedProgram) -> list[Finding]:
    program = numbered.program
    found: list[Finding] = []
    for part, operations in numbered.parts:
        ways = outcomes(operations, operations.items)
        if ways > OUTCOMES_MAX:
            why = f"its branches have {ways} outcomes, more than the {OUTCOMES_MAX} gone through"
            found.append(Finding(invariant=INVARIANT, role=program.role, operation=part, why=why))
    if found:
        return found
    setup = _Walk(program, numbered.setup, part=SETUP, entry=drained(numbered.setup), alive={})
    found = list(setup.found.values())
    alive = {name: _Held(PERSISTENT, NEVER, []) for name in program.persistent}
    step = _Walk(program, numbered.step, part=STEP, entry=unknown(numbered.step), alive=alive)
    if step.found or step.carried:
        # What is known of the step before may help; what it left alive may be freed in this one.
        seam, alive = step.timeline.seam, alive | step.carried
        step = _Walk(program, numbered.step, part=STEP, entry=seam, alive=alive)
    return found + list(step.found.values())


PERSISTENT, TOLD = -1, -2
"""Instead of the number of an `Allocate`: alive from before, and not alive but reported already."""


@dataclass(slots=True)
class _Held:
    """A buffer that is alive: the `Allocate`, what its home stream held then, and its last uses.

    `last` has the position of the last use on each stream; it is empty until there is one on a
    stream other than the home stream.
    """

    allocated: int
    tail: int
    last: list[int]


Alive = dict[str, _Held]


class _Walk:
    """Goes through a part along its timeline and notes what breaks a rule, each fault once."""

    def __init__(
        self, program: Program, numbered: Numbered, *, part: str, entry: Entry, alive: Alive
    ) -> None:
        self.program = program
        self.part = part
        self.numbered = numbered
        self.persistent = set(program.persistent)
        self.timeline = Timeline(numbered, entry)
        self.found: dict[tuple[str, str], Finding] = {}
        self.carried: Alive = {}
        self.unequal: set[str] = set()
        self._go(self.timeline.start, _copied(alive), [0] * len(numbered.streams))

    def _go(self, stretch: Stretch, alive: Alive, tails: list[int]) -> None:
        numbered = self.numbered
        streams, positions, touched = numbered.stream, numbered.position, numbered.buffers
        homes = numbered.home
        number = HOST
        for number, known in zip(stretch.items, stretch.known, strict=True):
            stream = streams[number]
            if stream == HOST:
                self._act(number, known, alive, tails)
                continue
            position = tails[stream] = positions[number]
            for buffer in touched[number]:
                held = alive.get(buffer)
                if held is None:
                    held = alive[buffer] = self._not_alive(number, buffer)
                home = homes[buffer]
                if home != stream:
                    if known[home] < held.tail:
                        self._reused(number, buffer, held, known[home])
                    if not held.last:
                        held.last = [NEVER] * len(numbered.streams)
                    held.last[stream] = position
        if stretch.ways:
            self._compare_sides(number)
            self._go(stretch.ways[0], _copied(alive), list(tails))
            self._go(stretch.ways[1], alive, tails)
        else:
            self._end(alive)

    def _act(self, number: int, known: Clock, alive: Alive, tails: list[int]) -> None:
        operation = self.numbered.operations[number]
        if isinstance(operation, Allocate):
            buffer = operation.buffer
            if (held := alive.get(buffer)) and held.allocated != TOLD:
                why = f"allocates {buffer}, which is alive: no free gives the first memory back"
                self._note(number, why, self._since(buffer, held))
            alive[buffer] = _Held(number, tails[self.numbered.home[buffer]], [])
        elif isinstance(operation, Free):
            held = alive.pop(operation.buffer, None)
            if held is None:
                why = f"frees {operation.buffer}, which is not alive"
                self._note(number, why, self._before(number, operation.buffer))
                return
            home = self.numbered.home[operation.buffer]
            for stream, position in enumerate(held.last):
                if stream != home and known[stream] < position:
                    self._still_used(number, operation, stream, position)
            if known[home] == self.numbered.position[number]:
                tails[home] = known[home]
        elif isinstance(operation, Branch) and operation.value.buffer not in alive:
            alive[operation.value.buffer] = self._not_alive(number, operation.value.buffer)

    def _end(self, alive: Alive) -> None:
        shift = self.numbered.length
        for buffer, held in alive.items():
            if buffer not in self.persistent:
                if held.allocated != TOLD and buffer not in self.unequal:
                    why = f"allocates {buffer}, which is alive when {self.part} ends and not freed"
                    self._note(held.allocated, why, ("it is not among the persistent buffers",))
            elif held.allocated >= 0:
                home = self.numbered.home[buffer]
                last = [position - shift[at] for at, position in enumerate(held.last)]
                self.carried[buffer] = _Held(PERSISTENT, held.tail - shift[home], last)
        for buffer in self.program.persistent:
            if buffer not in alive and buffer not in self.unequal:
                why = f"{buffer} is persistent, and not alive when {self.part} ends"
                self._note_at(self.part, why, self._before(len(self.numbered.operations), buffer))

    def _compare_sides(self, branch: int) -> None:
        operation = self.numbered.operations[branch]
        assert isinstance(operation, Branch)
        then, otherwise = _balance(operation.then), _balance(operation.otherwise)
        for buffer in sorted(then.keys() | otherwise.keys()):
            one, other = then.get(buffer, 0), otherwise.get(buffer, 0)
            if one != other:
                self.unequal.add(buffer)
                witness = tuple(
                    f"{name}: {('frees it', 'leaves it as it is', 'allocates it')[sign + 1]}"
                    for name, sign in (("then", one), ("otherwise", other))
                )
                self._note(branch, f"its lists leave {buffer} in different states", witness)

    def _not_alive(self, number: int, buffer: str) -> _Held:
        """Report a use of `buffer` outside its lifetime, and take it as alive from here on."""
        before = self._before(number, buffer)
        state = "after it was freed" if before else "before it is allocated"
        name = self.numbered.operations[number].id
        others = [
            f"{operation.id} uses it too"
            for later, operation in enumerate(self.numbered.operations)
            if later > number and buffer in self.numbered.buffers[later]
        ]
        self._note(
            number, f"uses {buffer} {state}", (*before, f"{name} uses {buffer}", *others[:4])
        )
        return _Held(TOLD, NEVER, [])

    def _reused(self, number: int, buffer: str, held: _Held, known: int) -> None:
        numbered = self.numbered
        home, stream = numbered.home[buffer], numbered.stream[number]
        holder = self._entry(home, held.tail)
        why = (
            f"reuse: uses {buffer} on {numbered.streams[stream]} unordered after what "
            f"{numbered.streams[home]} held when the memory was taken"
        )
        witness = (
            *self._since(buffer, held),
            f"{holder} was on {numbered.streams[home]} by then and may still use that memory",
            f"what {numbered.operations[number].id} has waited for there ends with "
            f"{self._entry(home, known)}",
        )
        self._note(number, why, witness)

    def _still_used(self, number: int, free: Free, stream: int, position: int) -> None:
        user = self._entry(stream, position)
        why = f"gives {free.buffer} back while {user} may still use it"
        witness = (
            f"{user} uses {free.buffer} on {self.numbered.streams[stream]}",
            f"{free.id} waits for {', '.join(free.uses) or 'nothing'}",
            f"name it in uses, or let {self.program.by_name[free.buffer].home} wait for it before",
        )
        self._note(number, why, witness)

    def _entry(self, stream: int, position: int) -> str:
        numbered = self.numbered
        if position <= 0:
            return "an operation of an earlier step" if position > NEVER else "nothing"
        for number, operation in enumerate(numbered.operations):
            on = numbered.home[operation.buffer] if isinstance(operation, Free) else None
            if numbered.position[number] == position and stream in (numbered.stream[number], on):
                return operation.id
        raise AssertionError(f"nothing is entry {position} of stream {stream}")

    def _since(self, buffer: str, held: _Held) -> tuple[str, ...]:
        if held.allocated < 0:
            return (f"{buffer} is alive since an earlier step",)
        return (f"{self.numbered.operations[held.allocated].id} took memory for {buffer}",)

    def _before(self, number: int, buffer: str) -> tuple[str, ...]:
        """The last free of `buffer` before `number`, if there is one."""
        for operation in reversed(self.numbered.operations[:number]):
            if isinstance(operation, Free) and operation.buffer == buffer:
                return (f"{operation.id} frees {buffer}",)
        return ()

    def _note(self, number: int, why: str, witness: tuple[str, ...]) -> None:
        self._note_at(self.numbered.operations[number].id, why, witness)

    def _note_at(self, where: str, why: str, witness: tuple[str, ...]) -> None:
        finding = Finding(
            invariant=INVARIANT, role=self.program.role, operation=where, why=why, witness=witness
        )
        self.found.setdefault((where, why), finding)


def _copied(alive: Alive) -> Alive:
    return {name: _Held(held.allocated, held.tail, list(held.last)) for name, held in alive.items()}


def _balance(operations: Iterable[Operation]) -> dict[str, int]:
    """Of each buffer that a list leaves in another state: 1 if it is allocated, -1 if it is freed.

    The lists of a branch in the list are compared by themselves; the second one speaks for both.
    """
    net: dict[str, int] = {}
    for operation in operations:
        match operation:
            case Allocate(buffer=buffer):
                net[buffer] = net.get(buffer, 0) + 1
            case Free(buffer=buffer):
                net[buffer] = net.get(buffer, 0) - 1
            case Branch(otherwise=otherwise):
                for name, change in _balance(otherwise).items():
                    net[name] = net.get(name, 0) + change
            case _:
                pass  # touches no lifetime
    return {name: max(-1, min(1, change)) for name, change in net.items() if change}
