"""Volume: a step sends what the contract promises, and holds no more memory.

Proved for every role: the ring-equivalent bytes of one step, summed over its operations by group
and collective with scalars apart, equal the promise as integers; the largest book of each pool, in
host issue order over setup and a step, is not above its promise. A contract that names its strategy
promises, where the model is given, what the closed forms say of both: volume and loss divisor. What
the contract leaves out is not examined. Of a branch, `otherwise` counts for the wire, and both
lists for memory.

Assumed: a deferred free returns as late as the schedule allows.

Cost: one look at each operation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from zsim.allocator import book, peak_bytes
from zsim.check.finding import Finding
from zsim.check.subject import NumberedProgram, Subject
from zsim.closed_form import wire_bytes
from zsim.collective.volume import communications, is_scalar, ring_equivalent_bytes
from zsim.numbered import Numbered
from zsim.operation import (
    Allocate,
    Branch,
    Free,
    FreeMode,
    Operation,
)
from zsim.plan import COLLECTIVE
from zsim.schedule import Program

INVARIANT = "volume"
Line = tuple[str, str, bool]
"""Group, collective, and whether it is a scalar."""


def examine(subject: Subject) -> list[Finding]:
    """Every line of the promised volume that is not kept, and every pool that holds more."""
    contract = subject.schedule.contract
    found = list(_contract(subject))
    promised: Counter[Line] = Counter()
    for line in contract.wire_bytes or ():
        promised[line.group, line.collective, line.scalar] += line.bytes
    for each in subject.programs:
        if contract.wire_bytes is not None:
            found += _wire(subject, each, promised)
        for role, pool, size in contract.peak_bytes:
            if role == each.program.role:
                found += _memory(each.program, pool, size)
    return found


def _contract(subject: Subject) -> Iterator[Finding]:
    """What the contract promises otherwise than model and strategy say."""
    contract, model = subject.schedule.contract, subject.model
    strategy = contract.strategy
    if strategy is None or model is None or model.tensor != strategy.tensor:
        return
    divisor = strategy.data * strategy.gradient_accumulation_steps
    needed = wire_bytes(model, strategy)
    for name, promised, said in (
        ("loss_divisor", contract.loss_divisor, divisor),
        ("wire_bytes", set(contract.wire_bytes or ()), set(needed)),
    ):
        if promised != said and (name != "wire_bytes" or contract.wire_bytes is not None):
            yield Finding(
                invariant=INVARIANT,
                role="",
                operation=f"contract/{name}",
                why=f"promises another {name} than model and strategy say",
                witness=(f"promised: {promised}", f"by closed form: {said}"),
            )


def _wire(subject: Subject, each: NumberedProgram, promised: Counter[Line]) -> Iterator[Finding]:
    schedule, step = subject.schedule, each.step
    counts = {group.name: group.size(schedule.mesh) for group in schedule.groups}
    counted = _without_overflow(step, step.items) if step.sides else None
    sent: Counter[Line] = Counter()
    senders: dict[Line, list[str]] = {}
    for number in step.communications:
        if counted is not None and number not in counted:
            continue
        for member in communications(step.operations[number]):
            size = ring_equivalent_bytes(member, counts[member.group])
            if size:
                line = (member.group, COLLECTIVE[type(member)], is_scalar(member))
                sent[line] += size
                senders.setdefault(line, []).append(f"{member.id}: {size} bytes")
    for line in sorted(sent.keys() | promised.keys()):
        if sent[line] != promised[line]:
            group, collective, scalar = line
            what = f"{'scalar ' if scalar else ''}{collective}"
            first, *others = senders.get(line, ["nothing sends"])
            yield Finding(
                invariant=INVARIANT,
                role=each.program.role,
                operation=f"{group}/{collective}",
                why=f"a step sends {sent[line]} bytes by {what}, promised are {promised[line]}",
                witness=(first, *others[:3], f"{len(senders.get(line, ()))} operations in all"),
            )


def _without_overflow(step: Numbered, items: list[int]) -> set[int]:
    """Numbers of the operations that run if every branch takes `otherwise`."""
    found = set(items)
    for number in items:
        if number in step.sides:
            found |= _without_overflow(step, step.sides[number][1])
    return found


def _memory(program: Program, pool: str, promised: int) -> Iterator[Finding]:
    if any(isinstance(op, Free) and op.mode is FreeMode.DEFERRED for op in program.by_id.values()):
        largest, at = peak_bytes(book(program, 2), pool), "a step"
    else:
        sizes = {each.name: each.size_bytes for each in program.buffers if each.pool == pool}
        entries = _Book(sizes)
        entries.run(program.setup)
        entries.run(program.step)
        largest, at = entries.largest, entries.at
    if largest > promised:
        yield Finding(
            invariant=INVARIANT,
            role=program.role,
            operation=at,
            why=f"pool {pool} holds {largest} bytes, promised are at most {promised}",
            witness=(f"{at} brings it to {largest} bytes",),
        )


class _Book:
    """Bytes that the host has taken from one pool, the most so far, and what brought them there."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.alive = 0
        self.largest = 0
        self.at = "setup"

    def run(self, operations: Iterable[Operation]) -> None:
        """Take and give back as `operations` say, both lists of a branch from where it stands."""
        for operation in operations:
            if isinstance(operation, Allocate):
                self.alive += self.sizes.get(operation.buffer, 0)
                if self.alive > self.largest:
                    self.largest, self.at = self.alive, operation.id
            elif isinstance(operation, Free):
                self.alive -= self.sizes.get(operation.buffer, 0)
            elif isinstance(operation, Branch):
                alive = self.alive
                self.run(operation.then)
                self.alive = alive
                self.run(operation.otherwise)
