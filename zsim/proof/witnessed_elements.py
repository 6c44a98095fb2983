"""Elements: the place to which copies move each one, and the number of writes to it.

The i-th element that a call reads is the i-th that it writes: torch's copies and sums are element
by element. An update by a fused operator writes the trained tensor, then the states in order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isclose

from zsim.proof.finding import Finding
from zsim.proof.witnessed_rank import ByteRange, MarkedInterval, WitnessedRank
from zsim.schedule.operation import Action, Compute, Copy, Fill, Operation, Role, View
from zsim.schedule.parameter_copy import held
from zsim.strategy.optimizer_rule import Optimizer
from zsim.trace.witness import Region

Where = Callable[[int], object]
"""Returns a key of the content of an element of a buffer."""


def moved(rank: WitnessedRank) -> Iterator[Finding]:
    """Find elements in wrong places or with too many writes, and wrong numbers."""
    for interval, homes in rank.with_homes():
        yield from _numbers(rank, interval, homes)
        match interval.operation:
            case Copy(target=target, divisor=divisor) as copy:
                yield from _copied(rank, interval, copy, homes)
                yield from _written(rank, interval, target, homes, often=1 + (divisor != 1))
            case Compute(action=Action.UPDATE, rule=Optimizer() as rule, operands=operands):
                for operand in operands:
                    if operand.role in (Role.PARAMETER, Role.MASTER):
                        yield from _written(rank, interval, operand.view, homes, often=1)
                if rule.fused:
                    yield from _in_place(rank, interval, interval.operation, homes)
            case Compute(action=Action.UNSCALE | Action.CLIP, operands=operands):
                for operand in operands:
                    if operand.role is Role.GRADIENT:
                        yield from _written(rank, interval, operand.view, homes, often=1)
            case _:
                pass


def _numbers(
    rank: WitnessedRank, interval: MarkedInterval, homes: Mapping[str, int]
) -> Iterator[Finding]:
    """Find numbers of an operation that no writing call had as an argument."""
    given = [number for call in interval.calls if call.writes for number in call.numbers]
    for what, view, *choices in _needed(interval.operation):
        part = rank.part(view, homes)
        was_given = any(isclose(one, other) for one in given for other in choices)
        if part.low < part.high and not was_given:
            why = f"no call was given its {what}, {choices[0]:g}"
            yield rank.refuted(interval, why, f"they were given {', '.join(map(str, given))}")


def _needed(operation: Operation | None) -> Iterator[tuple[str, View, *tuple[float, ...]]]:
    """Yield the meaning of a number, the view written with it, and its possible values."""
    match operation:
        case Copy(divisor=divisor, target=target) if divisor != 1:
            yield "divisor", target, divisor, 1 / divisor
        case Fill(value=value, scalar=None, target=target):
            yield "value", target, value
        case Compute(action=Action.UPDATE, rule=Optimizer() as rule, operands=(first, *_)):
            for what, number in rule.arguments:
                yield what, first.view, number
        case _:
            pass


def _written(
    rank: WitnessedRank,
    interval: MarkedInterval,
    view: View,
    homes: Mapping[str, int],
    *,
    often: int,
) -> Iterator[Finding]:
    """Find a byte of `view` with more than `often` writes."""
    part = rank.part(view, homes)
    changes: Counter[int] = Counter()
    for call in interval.calls:
        for number, low, size in call.writes:
            if number == part.storage and max(low, part.low) < min(low + size, part.high):
                changes[max(low, part.low)] += 1
                changes[min(low + size, part.high)] -= 1
    depth = 0
    for place in sorted(changes):
        depth += changes[place]
        if depth > often:
            why = f"wrote byte {place:,} of {part.buffer} {depth} times, the schedule {often}"
            yield rank.refuted(interval, why)
            return


def _copied(
    rank: WitnessedRank, interval: MarkedInterval, copy: Copy, homes: Mapping[str, int]
) -> Iterator[Finding]:
    """Find an element of an allocated buffer that was copied to a wrong place."""
    source, target = rank.part(copy.source, homes), rank.part(copy.target, homes)
    if source.storage is None or target.storage is None:
        return
    of_source, of_target = _where(rank, source, copy), _where(rank, target, copy)
    for call in interval.calls:
        rows = _rows(rank, source, call.reads), _rows(rank, target, call.writes)
        for ours, theirs in _pairs(*rows):
            if of_source(ours) != of_target(theirs):
                why = f"put element {ours:,} of {source.buffer} at {theirs:,} of {target.buffer}"
                yield rank.refuted(interval, why)
                return


def _rows(rank: WitnessedRank, part: ByteRange, regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Return first elements and sizes of a call's regions in the storage of `part`."""
    width = rank.rank.program.by_name[part.buffer].dtype.size_bytes
    return [
        (low // width, size // width) for number, low, size in regions if number == part.storage
    ]


def _where(rank: WitnessedRank, part: ByteRange, copy: Copy) -> Where:
    """Return a function from an element to its parameter and offset, or its place in the view."""
    buffer = rank.rank.program.by_name[part.buffer]
    if not copy.by_parameter:
        first = part.low // buffer.dtype.size_bytes
        return lambda element: element - first
    fragments = list(held(rank.schedule, buffer, rank.coordinates))

    def parameter_at(element: int) -> object:
        for one in fragments:
            if one.position <= element < one.position + one.size:
                return one.parameter, one.offset + element - one.position
        return None

    return parameter_at


def _pairs(
    ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield first and last elements of corresponding ranges, if both sides have equal sizes."""
    if sum(size for _, size in ours) != sum(size for _, size in theirs):
        return
    left, right = list(ours[::-1]), list(theirs[::-1])
    while left and right:
        (one, many), (other, others) = left.pop(), right.pop()
        size = min(many, others)
        yield one, other
        yield one + size - 1, other + size - 1
        if many > size:
            left.append((one + size, many - size))
        if others > size:
            right.append((other + size, others - size))


def _in_place(
    rank: WitnessedRank,
    interval: MarkedInterval,
    update: Compute,
    homes: Mapping[str, int],
) -> Iterator[Finding]:
    """Find operands updated in a wrong role, such as a first moment as the second.

    Tensors that are not whole vectors are updated through temporary memory of the operation.
    """
    rule = update.rule
    assert isinstance(rule, Optimizer)
    place_of: dict[int, set[int]] = {}
    for call in interval.calls:
        if call.operator.endswith(rule.fused):
            for place, (number, _, _) in enumerate(call.writes):
                place_of.setdefault(number, set()).add(place)
    for call in interval.calls:
        if call.operator.endswith("copy_") and len(call.reads) == len(call.writes) == 1:
            (source, _, _), (target, _, _) = call.reads[0], call.writes[0]
            place_of.setdefault(target, set()).update(place_of.get(source, ()))
    roles = (Role.MASTER, Role.PARAMETER, Role.MOMENT)
    updated = [each for each in update.operands if each.role in roles]
    moments = [each for each in updated if each.role is Role.MOMENT]
    trained = next((each for each in updated if each.role is Role.MASTER), updated[0])
    for place, operand in enumerate((trained, *moments)):
        part = rank.part(operand.view, homes)
        if part.storage is None or part.low == part.high:
            continue
        found = place_of.get(part.storage, set())
        if found != {place}:
            names = ["what is trained", *(f"moment {n}" for n in range(1, rule.moments + 1))]
            seen = " and ".join(names[each] for each in sorted(found)) or "nothing"
            yield rank.refuted(interval, f"{part.buffer} was updated as {seen}, is {names[place]}")
