"""Collectives as torch.distributed received them, on one rank and on all.

Proved of a rank: each operation passed on the arguments of the schedule, in its order, to process
groups with the right members, one for each communicator; no operation touched data in flight, and
all dependents of a collective waited for it. Proved of all ranks: calls of a process group match,
and checksums show that data arrived: an all-gather leaves each member's part, a broadcast its
root's data, an all-reduce the same on all, a receive what was sent. Reductions are compared by
sums, as exactly as their format allows. Data that one collective left is unchanged for the next
one, unless the schedule writes it in between.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from zsim.dtype import DType
from zsim.network.volume import communications
from zsim.proof.finding import Finding
from zsim.proof.witnessed_rank import FOREVER, ByteRange, MarkedInterval, WitnessedRank, sides
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Branch,
    Broadcast,
    CollectiveOperation,
    Communication,
    Edge,
    HostWait,
    PointToPoint,
    Previous,
    ReducingOperation,
    StreamOperation,
    View,
)
from zsim.trace.witness import Checksum, Region, WitnessedCollective

TORCH_NAME: Mapping[DType, str] = {
    DType.FP64: "float64",
    DType.FP32: "float32",
    DType.BF16: "bfloat16",
    DType.FP16: "float16",
    DType.INT64: "int64",
}
ROUNDING = {"float64": 2**-52, "float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}
"""Distance from 1 to the next number; the relative error of a sum of N numbers is N times that."""
LARGEST = {"float16": 65504.0, "bfloat16": 3e38, "float32": 3e38, "float64": 1e308}


def handed_over(rank: WitnessedRank) -> Iterator[Finding]:
    """Find operations with arguments to torch.distributed that differ from the schedule."""
    by_group: dict[str, str] = {}
    by_name: dict[str, str] = {}
    for interval, homes in rank.with_homes():
        operation = interval.operation
        members = () if operation is None else communications(operation)
        for member, seen in zip_longest(members, interval.collectives):
            if member is None:
                why = f"torch.distributed was handed one more {seen.kind}"
                yield rank.refuted(interval, why, _shown(seen))
            elif seen is None:
                why = f"torch.distributed was not handed its {member.name}"
                yield rank.refuted(interval, why)
            else:
                for what, expected, found in _compared(rank, member, seen, homes):
                    if expected != found:
                        why = f"{member.id} had {what} {found}, the schedule says {expected}"
                        yield rank.refuted(interval, why, _shown(seen))
                if (
                    by_group.setdefault(member.group, seen.communicator) != seen.communicator
                    or by_name.setdefault(seen.communicator, member.group) != member.group
                ):
                    why = f"{member.id} was handed to the communicator of another group"
                    yield rank.refuted(interval, why, _shown(seen))


def _shown(seen: WitnessedCollective) -> str:
    return f"{seen.kind} of {seen.dtype} among ranks {', '.join(map(str, seen.ranks))}"


def _compared(
    rank: WitnessedRank, member: Communication, seen: WitnessedCollective, homes: Mapping[str, int]
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, expected value, observed value) of each compared argument."""
    schedule, coordinates = rank.schedule, rank.coordinates
    group = schedule.group_by_name[member.group]
    ranks = group.members(schedule.mesh, coordinates)
    place = group.index(schedule.mesh, coordinates)
    yield "kind", member.name, seen.kind
    yield "ranks", ranks, seen.ranks
    yield "format", TORCH_NAME.get(member.wire, str(member.wire)), seen.dtype
    if isinstance(member, ReducingOperation):
        yield "reduction", str(member.reduction), seen.reduction
    match member:
        case Broadcast(root=root):
            yield "root", ranks[root], seen.peer
        case PointToPoint(offset=offset):
            yield "other end", ranks[(place + offset) % len(ranks)], seen.peer
        case _:
            pass
    # torch passes one tensor, used in place, to a collective that splits neither view.
    in_place = isinstance(member, CollectiveOperation) and not (member.splits or member.joins)
    source = None if in_place else member.reads
    for what, view, region in (
        ("source", source, seen.source),
        ("target", member.writes, seen.target),
    ):
        if view is not None:
            yield what, *_placed(rank, view, region, homes)


def _placed(
    rank: WitnessedRank, view: View, region: Region | None, homes: Mapping[str, int]
) -> tuple[object, object]:
    """Return the expected and the observed place of a view; only sizes for autograd's tensors."""
    part = rank.part(view, homes)
    number, first, size = region or (-1, 0, 0)
    if part.storage is None or part.low == part.high:
        return f"{part.high - part.low:,} bytes", f"{size:,} bytes"
    owner = next((name for name, home in homes.items() if home == number), "no buffer")
    return str(part), str(ByteRange(owner, number, first, first + size))


def flights(rank: WitnessedRank) -> Iterator[Finding]:
    """Find operations that touched data in flight, or did not wait for a collective."""
    flown: dict[str, list[WitnessedCollective]] = {}
    open_ones: list[WitnessedCollective] = []
    for interval in rank.intervals:
        open_ones += interval.collectives
        yield from _touched(rank, interval, open_ones)
        yield from _waited(rank, interval, flown)
        open_ones = [each for each in open_ones if (each.waited or FOREVER) > interval.end]
        if interval.operation is None:
            for each in open_ones:
                if (each.waited or FOREVER) > interval.begin and each.tick < interval.begin:
                    yield rank.refuted(interval, f"a {each.kind} was not waited for", _shown(each))
            open_ones = []
        elif interval.collectives:
            flown[interval.operation.id] = interval.collectives


def _touched(
    rank: WitnessedRank, interval: MarkedInterval, flying: Sequence[WitnessedCollective]
) -> Iterator[Finding]:
    for tick, reads, writes in interval.touches() if flying else ():
        for flight in flying:
            if not flight.tick < tick < (flight.waited or FOREVER):
                continue
            taken, given = sides(flight)
            for verb, ours, theirs in (
                ("reads", reads, given),
                ("writes", writes, (*taken, *given)),
            ):
                if any(_overlap(one, other) for one in ours for other in theirs):
                    holder = rank.at(flight.tick)
                    why = f"{verb} what {holder.name if holder else flight.kind} has in flight"
                    yield rank.refuted(interval, why, _shown(flight))


def _overlap(one: Region, other: Region) -> bool:
    return one[0] == other[0] and max(one[1], other[1]) < min(one[1] + one[2], other[1] + other[2])


def _waited(
    rank: WitnessedRank,
    interval: MarkedInterval,
    flown: Mapping[str, Sequence[WitnessedCollective]],
) -> Iterator[Finding]:
    """Find dependencies of `interval` on collectives for which nothing had waited at its start."""
    operation, latest = interval.operation, interval.end
    edges: tuple[Edge, ...] = ()
    match operation:
        case HostWait(operation=edge):
            edges = (edge,)
        case Branch(after=after):
            edges = after
        case _ if isinstance(operation, StreamOperation) and not communications(operation):
            edges = operation.after
            latest = min((call.tick for call in interval.calls), default=interval.end)
        case _:
            pass
    for name in map(_named, edges):
        for flight in flown.get(name, ()):
            if (flight.waited or FOREVER) >= latest:
                yield rank.refuted(interval, f"did not wait for {name}", _shown(flight))


def _named(edge: Edge) -> str:
    return edge.operation if isinstance(edge, Previous) else edge


def matched(ranks: Sequence[WitnessedRank]) -> Iterator[Finding]:
    """Find calls of one process group that do not match, and data that did not arrive."""
    queues: defaultdict[tuple[str, tuple[int, ...]], dict[int, list[WitnessedCollective]]]
    queues = defaultdict(dict)
    by_number = {each.rank.trace.rank: each for each in ranks}
    for number, rank in by_number.items():
        for seen in rank.witness.collectives:
            queues[seen.communicator, seen.ranks].setdefault(number, []).append(seen)
    for (_, members), by_rank in queues.items():
        if set(members) <= by_number.keys():  # else a rank is not in the trace
            yield from _collectives(by_number, members, by_rank)
            yield from _sends(by_number, members, by_rank)


def _collectives(
    by_number: Mapping[int, WitnessedRank],
    members: tuple[int, ...],
    by_rank: Mapping[int, Sequence[WitnessedCollective]],
) -> Iterator[Finding]:
    whole = [
        [each for each in by_rank.get(number, ()) if each.kind not in ("send", "receive")]
        for number in members
    ]
    for seen in zip_longest(*whole):
        first = next(each for each in seen if each is not None)
        rank = by_number[members[seen.index(first)]]
        interval = rank.at(first.tick) or rank.intervals[0]
        present = [each for each in seen if each is not None]
        unlike = {(each.kind, each.dtype, each.reduction, _size(each)) for each in present}
        if len(present) < len(members) or len(unlike) > 1:
            lines = [
                f"rank {number}: {'nothing' if each is None else _shown(each)}"
                for number, each in zip(members, seen, strict=True)
            ]
            yield rank.refuted(interval, "members handed over different collectives", *lines)
        elif all(each.waited is not None for each in present):
            why = _wrong(present)
            if why:
                yield rank.refuted(interval, f"{first.kind} {why}", _shown(first))


def _size(one: WitnessedCollective) -> int:
    return max(region[2] for region in (one.source, one.target, (0, 0, 0)) if region is not None)


def _wrong(seen: Sequence[WitnessedCollective]) -> str:
    """Return the fault in the checksums of the members of one collective, or ""."""
    first = seen[0]
    left = [_exact(one.left) for one in seen]
    match first.kind:
        case "all_gather":
            parts = [one.brought[0][0] for one in seen if one.brought]
            if any(each != parts for each in left):
                return "did not leave every member's part on every rank, in order"
        case "all_to_all" if any(len(one.brought) != len(seen) for one in seen):  # unequal blocks
            sent = sum(bits for one in seen for bits in _exact(one.brought))
            arrived = sum(bits for one in seen for bits in _exact(one.left))
            if (sent - arrived) % 2**64 == 0 or any(one.waited is None for one in seen):
                return ""
            return "did not leave the elements that members sent"
        case "all_to_all":
            for place, one in enumerate(seen):
                blocks = [_exact(each.brought)[place] for each in seen]
                if one.left and _exact(one.left) != blocks:
                    return "did not leave the blocks that members sent, in order"
        case "broadcast":
            roots = [_exact(one.brought) for one in seen if one.brought]
            if len(roots) != 1 or any(each != roots[0] for each in left):
                return "did not leave its root's data on every rank"
        case "all_reduce":
            if any(each != left[0] for each in left):
                return "left other data on other ranks"
            if first.left and not _sums(first, [one.brought[0] for one in seen], first.left[0]):
                return "did not leave the reduction of what ranks brought"
        case "reduce_scatter":
            for place, one in enumerate(seen):
                parts_of_it = [each.brought[place] for each in seen if len(each.brought) > place]
                if one.left and not _sums(first, parts_of_it, one.left[0]):
                    return "did not leave the reduction of what ranks brought"
        case _:
            return "is no collective that a schedule has"
    return ""


def _exact(sums: Sequence[Checksum]) -> list[int]:
    return [bits for bits, _, _ in sums]


def _sums(one: WitnessedCollective, brought: Sequence[Checksum], left: Checksum) -> bool:
    """Return True if `left` can be the reduction of `brought`, judged by its sum."""
    size = sum(magnitude for _, _, magnitude in brought)
    if not math.isfinite(size) or size > LARGEST.get(one.dtype, math.inf):
        return True  # it overflows, in an intermediate sum if not in the result
    if one.reduction == "max":
        of_one = _size(one) == {"float16": 2, "bfloat16": 2, "float32": 4}.get(one.dtype, 8)
        return not of_one or left[1] == max(total for _, total, _ in brought)
    total = sum(total for _, total, _ in brought)
    if one.reduction == "average":
        total, size = total / len(brought), size / len(brought)
    allowed = 2 * (len(brought) + 1) * ROUNDING.get(one.dtype, 0.0) * size
    return abs(left[1] - total) <= allowed + 2.0**-24  # below it fp16 has no numbers


def _sends(
    by_number: Mapping[int, WitnessedRank],
    members: tuple[int, ...],
    by_rank: Mapping[int, Sequence[WitnessedCollective]],
) -> Iterator[Finding]:
    """Compare the k-th send from one rank to another with the k-th receive there."""
    for source in members:
        for target in members:
            sent = [
                each
                for each in by_rank.get(source, ())
                if each.kind == "send" and each.peer == target
            ]
            received = [
                each
                for each in by_rank.get(target, ())
                if each.kind == "receive" and each.peer == source
            ]
            rank = by_number[source if len(sent) >= len(received) else target]
            for each in sent[len(received) :] or received[len(sent) :]:
                interval = rank.at(each.tick) or rank.intervals[0]
                yield rank.refuted(interval, "was met by nothing", _shown(each))
            for one, other in zip(sent, received, strict=False):
                if other.left and _exact(one.brought) != _exact(other.left):
                    interval = rank.at(one.tick) or rank.intervals[0]
                    why = f"rank {target} did not get what it was sent"
                    yield rank.refuted(interval, why, _shown(one))


def kept(rank: WitnessedRank) -> Iterator[Finding]:
    """Find data that changed between two collectives without a write in the schedule.

    Tensors made by autograd are skipped: they may be scaled in place.
    """
    known: defaultdict[int, dict[Region, tuple[int, MarkedInterval]]] = defaultdict(dict)
    for interval, homes in rank.with_homes():
        operation = interval.operation
        for seen in interval.collectives:
            for region, (bits, _, _) in _pieces(seen.source, seen.brought):
                before = known[region[0]].setdefault(region, (bits, interval))
                if before[0] != bits and region[0] in homes.values():
                    why = f"what it reads has changed since {before[1].name}, nothing writes there"
                    yield rank.refuted(interval, why, _shown(seen))
        for access in () if operation is None else accesses(operation):
            part = rank.part(access.view, homes)
            if access.writes and part.storage is not None:
                written = part.storage, part.low, part.high - part.low
                of_it = known[part.storage]
                for region in [each for each in of_it if _overlap(each, written)]:
                    del of_it[region]
        for seen in interval.collectives:
            for region, (bits, _, _) in _pieces(seen.target, seen.left):
                known[region[0]][region] = bits, interval


def _pieces(region: Region | None, sums: Sequence[Checksum]) -> Iterator[tuple[Region, Checksum]]:
    if region is None or not sums:
        return
    number, start, size = region
    each_bytes = size // len(sums)
    for place, one in enumerate(sums):
        yield (number, start + place * each_bytes, each_bytes), one
