"""Check the counts of a schedule, the buffers whose rows they count, and exchanges of these."""

from collections.abc import Mapping

from msgspec.structs import replace

from zsim.model.experts import Drops
from zsim.schedule.communication import AllGather, Communication, ReduceScatter
from zsim.schedule.counts import NamedCount, RowIndex, Rows, rows_at_most
from zsim.schedule.mesh import Group, Mesh
from zsim.schedule.operation import AllToAll, ReadCounts, View
from zsim.schedule.program import Buffer, ScheduleError


def inspect_count(mesh: Mesh, groups: Mapping[str, Group], count: NamedCount) -> None:
    """Raise ScheduleError unless the members of a count's group share its experts evenly.

    Raises:
        ScheduleError: they do not, or the maximum is smaller than the mean.
    """
    where = f"count {count.name}"
    if count.group not in groups:
        raise ScheduleError(f"{where}: no group {count.group!r}")
    members = groups[count.group].size(mesh)
    if count.experts < 1 or count.experts % members:
        needed = f"must be a multiple of the {members} members of group {count.group}"
        raise ScheduleError(f"{where}: experts {count.experts} {needed}")
    if count.sent < 0:
        raise ScheduleError(f"{where}: sent {count.sent} must be at least 0")
    if count.capacity < 0:
        raise ScheduleError(f"{where}: capacity {count.capacity} must be at least 0, for no limit")
    if count.capacity and count.capacity * count.experts < count.sent:
        mean = f"{-(-count.sent // count.experts)}, the mean of an expert"
        raise ScheduleError(f"{where}: capacity {count.capacity} must be at least {mean}")
    if count.padded and (count.sent % count.experts or count.maximum != count.sent):
        needed = f"a multiple of experts {count.experts}, and maximum the same"
        raise ScheduleError(f"{where}: padded: sent {count.sent} must be {needed}")
    if count.drops is not None:
        _inspect_drops(where, count, count.drops)
    if count.maximum < count.sent:
        mean = f"the mean, {count.sent} rows that each member sends"
        raise ScheduleError(f"{where}: maximum {count.maximum} must be at least {mean}")


def _inspect_drops(where: str, count: NamedCount, drops: Drops) -> None:
    """Raise ScheduleError unless rows can be dropped beyond a capacity.

    Raises:
        ScheduleError: the capacity is below 1, or padding fills another number of rows.
    """
    if drops.capacity < 1:
        raise ScheduleError(f"{where}: drops: capacity {drops.capacity} must be at least 1")
    if count.padded and count.sent != drops.capacity * count.experts:
        needed = f"{drops.capacity} for each of {count.experts} experts"
        raise ScheduleError(f"{where}: padded: sent {count.sent} must be the capacity, {needed}")


def inspect_rows(where: str, buffer: Buffer, rows: Rows, counts: Mapping[str, NamedCount]) -> None:
    """Raise ScheduleError unless a buffer has the elements of its rows at their maximum.

    Raises:
        ScheduleError: the elements, width, order or layout is wrong, or the count is not declared.
    """
    count = need_count(where, rows.count, counts)
    if rows.width < 1:
        raise ScheduleError(f"{where}: rows: width {rows.width} must be at least 1")
    if sorted(rows.order) != sorted(RowIndex):
        raise ScheduleError(f"{where}: rows: order must name source and expert, once each")
    if buffer.layout is not None:
        raise ScheduleError(f"{where}: has a layout and counted rows; remove one")
    if buffer.elements != (needed := rows_at_most(count, rows)):
        raise ScheduleError(f"{where}: {buffer.elements} elements, its rows have {needed} at most")


def need_count(where: str, name: str, counts: Mapping[str, NamedCount]) -> NamedCount:
    """Return the count of that name.

    Raises:
        ScheduleError: it is not declared.
    """
    if name not in counts:
        known = f"; counts are {', '.join(counts)}" if counts else ""
        raise ScheduleError(f"{where}: no count {name!r}{known}")
    return counts[name]


def inspect_read(read: ReadCounts, count: NamedCount, members: int) -> None:
    """Raise ScheduleError unless the host reads a number for each source and own, or any, expert.

    Ranks with parts of the same experts read the numbers of all their sources. Ranks that gather
    all tokens read one number for each own expert, the sum over sources.

    Raises:
        ScheduleError: it reads another number of elements.
    """
    needed = members * (count.experts // members)
    size, every = read.source.size, members * count.experts
    if size not in (needed, needed // members) and (size % every or not size):
        what = f"{members} sources with {count.experts // members} experts need {needed}"
        raise ScheduleError(f"{read.id}: reads {read.source.size} elements, {what}")


def is_counted(exchange: AllToAll, buffers: Mapping[str, Buffer]) -> bool:
    """Return True if an exchange moves counted rows."""
    views = (exchange.source, exchange.target)
    return any(buffers[view.buffer].rows is not None for view in views)


def inspect_exchange(
    exchange: AllToAll, buffers: Mapping[str, Buffer], counts: Mapping[str, NamedCount]
) -> None:
    """Raise ScheduleError unless block j of member i and block i of member j have one name.

    Raises:
        ScheduleError: they have not: another count, layer, width or order of rows.
    """
    where = exchange.id
    found = [buffers[view.buffer] for view in (exchange.source, exchange.target)]
    rows = [each.rows for each in found if each.rows is not None]
    if len(rows) != 2:
        (plain,) = (each.name for each in found if each.rows is None)
        raise ScheduleError(f"{where}: exchanges counted rows with {plain}, which has none")
    one, other = rows
    if (one.count, one.layer, one.width) != (other.count, other.layer, other.width):
        raise ScheduleError(f"{where}: blocks are {_named(one)} and {_named(other)}")
    if one.own is other.own:
        raise ScheduleError(f"{where}: both buffers hold rows by own {one.own}; exchange needs one")
    for buffer, each in zip(found, rows, strict=True):
        if each.outer is each.own:
            outer = f"its outer index is {each.outer}, which the rank has alone"
            raise ScheduleError(f"{where}: {buffer.name} cannot be cut by member: {outer}")
    if counts[one.count].group != exchange.group:
        group = counts[one.count].group
        raise ScheduleError(f"{where}: group {exchange.group}, but {one.count} is of {group}")


def _named(rows: Rows) -> str:
    return f"{rows.count} of layer {rows.layer}, {rows.width} wide"


def inspect_blocks(where: str, exchange: AllToAll, members: int) -> None:
    """Raise ScheduleError unless the unequal blocks of an exchange fill its views.

    Raises:
        ScheduleError: they do not, or there is not one for each member.
    """
    for name, blocks, view in (
        ("sent", exchange.sent, exchange.source),
        ("received", exchange.received, exchange.target),
    ):
        if len(blocks) != members:
            raise ScheduleError(f"{where}: {name} has {len(blocks)} blocks for {members} members")
        if min(blocks) < 0 or sum(blocks) != view.size:
            size = f"{view.buffer} has {view.size} elements"
            raise ScheduleError(f"{where}: {name} has blocks of {sum(blocks)}, {size}")
    if exchange.kept not in exchange.sent or exchange.kept not in exchange.received:
        raise ScheduleError(f"{where}: kept {exchange.kept} is no block that it sends and receives")


def need_gathered(
    operation: Communication, buffers: Mapping[str, Buffer], buffer: Buffer, members: int
) -> None:
    """Raise ScheduleError if the rows of a buffer are counted, unless they are gathered or summed.

    Ranks with parts of the same experts gather the rows of all of them, and add up and scatter
    results.

    Raises:
        ScheduleError: another collective moves them, or not the rows of all `members`.
    """
    if buffer.rows is None:
        return
    where = operation.id
    if not isinstance(operation, AllGather | ReduceScatter):
        raise ScheduleError(f"{where}: rows of {buffer.name} are counted; only AllToAll moves them")
    own, every = operation.source, operation.target
    if isinstance(operation, ReduceScatter):
        own, every = every, own
    one, all_rows = buffers[own.buffer].rows, buffers[every.buffer].rows
    whole = None if one is None else replace(one, parts=one.parts * members)
    if whole is None or whole != all_rows or whole.own is not RowIndex.EXPERT:
        raise ScheduleError(
            f"{where}: {every.buffer} must have the received rows of all {members} members, and "
            f"{own.buffer} the rows of one"
        )


def need_whole(where: str, buffer: Buffer, view: View) -> None:
    """Raise ScheduleError if a view is a part of a buffer whose rows are counted.

    Raises:
        ScheduleError: it is: where the part ends depends on the numbers.
    """
    if buffer.rows is not None and view != View(buffer=buffer.name, size=buffer.elements):
        raise ScheduleError(f"{where}: a view of {buffer.name} must have all its counted rows")
