"""Memory: no execution holds more than promised, and all memory held is used.

Proved for every role and pool with a promised peak or a capacity: in every execution that the
schedule allows, over any number of steps and all paths through branches, the bytes in use never
exceed it. Bytes are counted in the order of issue, so waited and host frees return at their place
in it however fast host and devices are. A deferred free may return as late as the host knows that
its uses have finished: at the first allocation after a wait of the host that is ordered after them
(`zsim.schedule.happens_before`), in that step or a later one. If the host never waits for them,
memory grows with every step.

Proved of workspaces and saved tensors: accesses reach every element of the buffer, so a buffer
larger than its use is found wherever it is. Operands that updates train or keep have a matching
kind of buffer. With model and strategy of zsim's own stages given: persistent model states have
the sizes of the closed form, kind by kind. Buffers with a layout have its size in every valid
schedule.

Cost: linear in allocations and frees, for each path through the branches; with deferred frees,
repeated until a step leaves the state in which it started.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from zsim.closed_form.states import persistent_bytes
from zsim.proof.context import Context, NumberedProgram
from zsim.proof.finding import Finding
from zsim.proof.overlap import Overlap, Span
from zsim.schedule.access import accesses
from zsim.schedule.happens_before import BranchPath
from zsim.schedule.operation import Action, Allocate, Compute, Free, FreeMode, Role
from zsim.schedule.program_index import ALLOCATE, FREE, WHOLE, Numbered
from zsim.schedule.schedule import Kind

INVARIANT = "memory"
SIZED = (Kind.SAVED, Kind.WORKSPACE)
"""Kinds of buffers whose size must match their use; communication buffers may have room."""

KINDS = {
    Role.PARAMETER: (Kind.PARAMETER, Kind.MASTER),
    Role.MASTER: (Kind.MASTER,),
    Role.MOMENT: (Kind.MOMENT,),
}
"""Kinds of operands that updates train or keep; memory is reported, and states read, by them."""

STEPS_MAX = 6
"""Number of steps after which memory that returns ever later counts as growing forever."""

PartNumbers = dict[int, list[int]]
"""Numbers of allocations and frees, by the `id` of their part."""

Pending = tuple[tuple[int, int], ...]
"""Deferred frees whose memory has not returned: the free, and its age in steps."""


def examine(context: Context) -> list[Finding]:
    """Find pools that may exceed their limit, partly unused buffers, and wrong states."""
    found: list[Finding] = []
    promises = {(role, pool): size for role, pool, size in context.schedule.contract.peak_bytes}
    overlap = Overlap(context.schedule)
    for each in context.programs:
        role, numbers = each.program.role, _by_pool(each)
        for pool in context.schedule.pools:
            limits = [
                (what, size)
                for what, size in (
                    ("promised", promises.get((role, pool.name))),
                    ("its capacity", pool.capacity_bytes),
                )
                if size is not None
            ]
            if limits and not each.crowded:
                own = numbers[pool.name]
                found += _pool(each, pool.name, limits, pool.slot_bytes, numbers=own)
        found += _unused(each, overlap)
        found += _kinds(each)
        found += _states(context, each)
    return found


def _by_pool(each: NumberedProgram) -> dict[str, PartNumbers]:
    """Return the allocations and frees to count for each pool.

    With deferred frees all are needed, since memory may return at any allocation; otherwise only
    those of the pool.
    """
    pools = {buffer.name: buffer.pool for buffer in each.program.buffers}
    found: defaultdict[str, PartNumbers] = defaultdict(
        lambda: {id(part): part.memory if part.defers else [] for _, part in each.parts}
    )
    for _, part in each.parts:
        operations = cast("list[Allocate | Free]", part.operations)
        for number in () if part.defers else part.memory:
            found[pools[operations[number].buffer]][id(part)].append(number)
    return found


@dataclass(slots=True)
class _PoolPeak:
    """The peak of a pool: its allocation and path, and the frees pending at the part's start."""

    size: int = 0
    at: int = -1
    path: BranchPath | None = None
    pending: Pending = ()
    alive: dict[str, int] = field(default_factory=dict[str, int])


def _pool(
    each: NumberedProgram,
    pool: str,
    limits: list[tuple[str, int]],
    slot: int | None,
    *,
    numbers: PartNumbers,
) -> Iterator[Finding]:
    sizes = {
        buffer.name: buffer.size_bytes for buffer in each.program.buffers if buffer.pool == pool
    }
    peak, grows = _worst(each, sizes, numbers)
    for what, limit in limits:
        if peak.size <= limit and not grows:
            continue
        says = f"are at most {limit}" if what == "promised" else f"is {limit}"
        if slot and what != "promised":
            says = f"is {limit}, {limit // slot} slots"
        why = f"pool {pool} may hold {peak.size} bytes, {what} {says}"
        if grows:
            why = f"pool {pool} may hold more with every step, {what} {says}"
        yield Finding(
            invariant=INVARIANT,
            role=each.program.role,
            operation=_at(peak),
            why=why,
            witness=tuple(_witness(peak, sizes, numbers)),
        )


def _at(peak: _PoolPeak) -> str:
    return "setup" if peak.path is None else peak.path.numbered.operations[peak.at].id


def _witness(peak: _PoolPeak, sizes: dict[str, int], numbers: PartNumbers) -> Iterator[str]:
    """Yield buffers alive at the peak, the largest first, and frees whose memory is not back."""
    if peak.path is None:
        return
    yield f"{_at(peak)} brings it to {peak.size} bytes"
    ledger = _PoolUse(sizes, numbers)
    ledger.alive = dict(peak.alive)
    late = ledger.follow(peak.path, peak.pending, until=peak.at)
    largest = sorted(ledger.alive.items(), key=lambda item: -item[1])[:5]
    yield from (f"alive: {name}, {size} bytes" for name, size in largest if size > 0)
    operations = peak.path.numbered.operations
    for free, _ in late[:5]:
        name = operations[free].id
        yield f"freed by {name}, and nothing has made the host wait for its uses"


def _worst(
    each: NumberedProgram, sizes: dict[str, int], numbers: PartNumbers
) -> tuple[_PoolPeak, bool]:
    """Return the peak over all executions, and whether memory grows with every step."""
    ledger = _PoolUse(sizes, numbers)
    for path in each.setup_order.paths:
        ledger.alive = dict.fromkeys(sizes, 0)
        ledger.follow(path, ())
    persistent = dict(ledger.alive)
    order = each.settled_order if each.step.defers else each.step_order
    seen: set[Pending] = set()
    waiting: set[Pending] = {()}
    for _ in range(STEPS_MAX):
        left: set[Pending] = set()
        for pending in sorted(waiting):
            for path in order.paths:
                ledger.alive = dict(persistent)
                left.add(ledger.follow(path, pending))
        seen |= waiting
        waiting = left - seen
        if not waiting:
            return ledger.peak, False
    return ledger.peak, True


class _PoolUse:
    """Bytes in use in one pool, and their peak."""

    def __init__(self, sizes: dict[str, int], numbers: PartNumbers) -> None:
        self.sizes = sizes
        self.numbers = numbers
        self.alive = dict.fromkeys(sizes, 0)
        self.peak = _PoolPeak()

    def follow(self, path: BranchPath, pending: Pending, until: int | None = None) -> Pending:
        """Count one part from `alive` and `pending`; return the frees pending at its end.

        With `until`, stop after that operation.
        """
        numbered, known_at = path.numbered, path.known
        operations, sizes, alive = numbered.operations, self.sizes, self.alive
        before = dict(alive)
        late = list(pending)
        total = sum(alive.values()) + sum(_size(numbered, number, sizes) for number, _ in late)
        largest, at = self.peak.size, -1
        asked, host = 0, None  # number of `late` tested so far with this clock of the host
        for number in self.numbers[id(numbered)]:
            if known_at[number] is None:
                continue
            operation = operations[number]
            if type(operation) is Allocate:
                if late:
                    begin = asked if known_at[number] is host else 0
                    for item in [item for item in late[begin:] if _is_back(path, item, number)]:
                        late.remove(item)
                        total -= _size(numbered, item[0], sizes)
                    asked, host = len(late), known_at[number]
                size = sizes.get(operation.buffer)
                if size is not None:
                    alive[operation.buffer] += size
                    total += size
                    if total > largest:
                        largest, at = total, number
            elif type(operation) is Free:
                size = sizes.get(operation.buffer)
                if size is not None:
                    alive[operation.buffer] -= size
                    if size and operation.mode is FreeMode.DEFERRED and numbered.edges[number]:
                        late.append((number, 0))
                    else:
                        total -= size
            if number == until:
                break
        if at >= 0:
            self.peak = _PoolPeak(largest, at, path, pending, before)
        return tuple((number, ago + 1) for number, ago in late)


def _size(numbered: Numbered, free: int, sizes: dict[str, int]) -> int:
    operation = numbered.operations[free]
    assert isinstance(operation, Free)
    return sizes[operation.buffer]


def _is_back(path: BranchPath, item: tuple[int, int], allocate: int) -> bool:
    """Return True if the host knows, at an allocation, that a deferred free's uses have ended."""
    free, ago = item
    numbered, known = path.numbered, path.known[allocate]
    assert known is not None
    for use in numbered.edges[free]:
        if ago == 0 and path.known[use] is None:
            continue  # it is in a list that was not taken
        stream = numbered.stream[use]
        if known[stream] < numbered.position[use] - ago * len(numbered.entries[stream]):
            return False
    return True


def _unused(each: NumberedProgram, overlap: Overlap) -> Iterator[Finding]:
    """Find buffers with a part that is neither read nor written."""
    whole = {
        name
        for _, numbered in each.parts
        for name, history in numbered.history.items()
        if WHOLE in history.codes
    }
    for buffer in each.program.buffers:
        if buffer.name in whole or buffer.layout is not None or buffer.kind not in SIZED:
            continue
        spans: list[Span] = []
        taken = ""
        for _, numbered in each.parts:
            history = numbered.history.get(buffer.name)
            for number, code in zip(history.numbers, history.codes, strict=True) if history else ():
                operation = numbered.operations[number]
                if code == ALLOCATE:
                    taken = taken or operation.id
                elif code != FREE:
                    views = (access.view for access in accesses(operation))
                    spans += [overlap.hull(view) for view in views if view.buffer == buffer.name]
        gap = _gap(spans, buffer.elements)
        if taken and gap is not None:
            unused = (gap[1] - gap[0]) * buffer.dtype.size_bytes
            yield Finding(
                invariant=INVARIANT,
                role=each.program.role,
                operation=taken,
                why=f"takes memory for {buffer.name} that nothing uses, {unused} bytes at least",
                witness=(
                    f"{buffer.name} has {buffer.elements} elements",
                    f"nothing reads or writes elements {gap[0]} to {gap[1]}",
                ),
            )


def _gap(spans: list[Span], elements: int) -> Span | None:
    """Return the first range of elements in no span; None if the spans cover all."""
    end = 0
    for low, high in sorted(spans):
        if end < low < high:
            return end, low
        end = max(end, high)
    return (end, elements) if end < elements else None


def _kinds(each: NumberedProgram) -> Iterator[Finding]:
    """Find buffers of model states with another kind than their role in updates."""
    for operation in each.program.patterns:
        if not isinstance(operation, Compute) or operation.action is not Action.UPDATE:
            continue
        for operand in operation.operands:
            buffer = each.program.by_name[operand.view.buffer]
            if buffer.kind not in KINDS.get(operand.role, (buffer.kind,)):
                why = f"uses {buffer.name} as {operand.role}, whose kind is {buffer.kind}"
                yield Finding(
                    invariant=INVARIANT, role=each.program.role, operation=operation.id, why=why
                )


def _states(context: Context, each: NumberedProgram) -> Iterator[Finding]:
    """Compare persistent model states, by kind, with the closed form."""
    model, strategy = context.model, context.schedule.contract.strategy
    if model is None or strategy is None or model.tensor != strategy.parallel.tensor:
        return
    needed = persistent_bytes(model, strategy)
    if needed is None:
        return
    held: Counter[Kind] = Counter()
    for name in each.program.persistent:
        buffer = each.program.by_name[name]
        held[buffer.kind] += buffer.size_bytes
    for kind, size in needed.items():
        if held[kind] != size:
            yield Finding(
                invariant=INVARIANT,
                role=each.program.role,
                operation=f"persistent/{kind}",
                why=f"keeps {held[kind]} bytes of {kind}, model and strategy need {size}",
                witness=tuple(
                    f"{name}: {each.program.by_name[name].size_bytes} bytes"
                    for name in each.program.persistent
                    if each.program.by_name[name].kind is kind
                )[:5],
            )
