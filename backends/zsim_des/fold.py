"""Ranks that no one can tell apart, and the links that their groups use.

Two ranks are of one class if they run the same program, their communicators look alike (ranks,
nodes, how many on the own node), and the ranks that they meet in communicators, by Send and Receive
and on their NIC are of the same classes: the coarsest such partition, found by refining colours
until nothing changes. So one rank stands exactly for its class, and one collective of a class of
communicators for all of them. Most schedules have one class, found without refining.
"""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from zsim.cluster import Cluster
from zsim.mesh import Group, Mesh
from zsim.operation import (
    AllGather,
    AllReduce,
    Broadcast,
    Receive,
    ReduceScatter,
    Send,
    Together,
)
from zsim.schedule import Program, Schedule

Ints = npt.NDArray[np.int64]

COLLECTIVES = (AllGather, AllReduce, Broadcast, Receive, ReduceScatter, Send, Together)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorClass:
    """Communicators of one group that no one can tell apart.

    `classes` are the rank classes in them; each communicator has `ranks` ranks on `nodes` nodes.
    """

    index: int
    group: str
    classes: tuple[int, ...]
    ranks: int
    nodes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end of a Send or Receive: its class, and whether it is on another node."""

    rank_class: int
    is_far: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """`count` ranks that do the same at the same times; `rank` is the first of them.

    `shares` has, by group, the part of its communicator's bytes that leaves the node through this
    rank's NIC: 1/m for a ring with m ranks on the node, 0 if it stays there.
    """

    index: int
    program: Program
    rank: int
    count: int
    communicators: dict[str, CommunicatorClass]
    shares: dict[str, Fraction]
    peers: dict[tuple[str, int], Peer]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicClass:
    """`count` NICs used alike: ranks of each class per NIC (part of one, if it has several).

    The count is whole but where GPUs share NICs unevenly, as 2 GPUs with 3 NICs.
    """

    count: Fraction
    ranks: dict[int, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """All classes of a schedule on a cluster."""

    ranks: tuple[RankClass, ...]
    communicators: tuple[CommunicatorClass, ...]
    nics: tuple[NicClass, ...]


@dataclass(slots=True)
class _Spread:
    """Where the communicators of a group lie. Arrays are by rank; -1 where the rank is in none.

    `members[i]` are the ranks of communicator i, ascending.
    """

    communicator: Ints
    members: Ints
    on_node: Ints
    nodes: Ints
    far: dict[int, Ints] = field(default_factory=dict[int, "Ints"])
    peer: dict[int, Ints] = field(default_factory=dict[int, "Ints"])


def fold(schedule: Schedule, cluster: Cluster, *, unfold: bool = False) -> Fold:
    """The classes of `schedule` on `cluster`; with `unfold` every rank is its own."""
    mesh = schedule.mesh
    every = np.arange(mesh.size)
    node, place = np.divmod(every, cluster.gpus_per_node)
    bundle_count = min(cluster.gpus_per_node, cluster.nics_per_node)
    bundle = node * bundle_count + place * bundle_count // cluster.gpus_per_node
    coordinates = _coordinates(mesh, every)
    used = _used(schedule)
    spreads = {name: _spread(schedule, name, coordinates, node) for name in used}
    for name, offsets in used.items():
        for offset in offsets:
            _find_peers(spreads[name], offset, node)
    if unfold:
        colour: Ints = every
    else:
        traits = _traits(schedule, coordinates, spreads, bundle)
        colour = _refined(traits, spreads, bundle)
    index_of, firsts, counts = _by_first_rank(colour)
    ranks, communicators = _classes(schedule, index_of, (firsts, counts), spreads)
    nics = _nics(index_of, bundle, Fraction(bundle_count, cluster.nics_per_node))
    return Fold(ranks=ranks, communicators=communicators, nics=nics)


def _coordinates(mesh: Mesh, every: Ints) -> dict[str, Ints]:
    rest = every
    found: dict[str, Ints] = {}
    for axis in reversed(mesh.axes):
        rest, found[axis.name] = np.divmod(rest, axis.size)
    return found


def _used(schedule: Schedule) -> dict[str, list[int]]:
    """Groups that some program uses, each with the offsets of its Sends and Receives."""
    found: dict[str, list[int]] = {}
    for program in schedule.programs:
        for operation in program.by_id.values():
            if not isinstance(operation, COLLECTIVES):
                continue
            members = operation.members if isinstance(operation, Together) else (operation,)
            for member in members:
                offsets = found.setdefault(member.group, [])
                if isinstance(member, Send | Receive) and member.offset not in offsets:
                    offsets.append(member.offset)
    return found


def _spread(schedule: Schedule, name: str, coordinates: dict[str, Ints], node: Ints) -> _Spread:
    mesh, group = schedule.mesh, schedule.group_by_name[name]
    held, label, position = _labels(mesh, group, coordinates)
    inside = np.flatnonzero(held)
    order = inside[np.lexsort((position[inside], label[inside]))]
    members = order.reshape(-1, group.size(mesh))
    communicator = np.full(len(node), -1)
    communicator[members] = np.arange(len(members))[:, None]
    node_count = int(node[-1]) + 1
    pair = communicator[inside] * node_count + node[inside]
    pairs, where, counts = np.unique(pair, return_inverse=True, return_counts=True)
    on_node = np.full(len(node), -1)
    on_node[inside] = counts[where]
    spanned = np.bincount(pairs // node_count, minlength=len(members))
    nodes = np.full(len(node), -1)
    nodes[inside] = spanned[communicator[inside]]
    return _Spread(communicator, members, on_node, nodes)


def _labels(mesh: Mesh, group: Group, coordinates: dict[str, Ints]) -> tuple[Ints, Ints, Ints]:
    """Whether a rank is in the group, which communicator (any number), and its place in it."""
    limits = mesh.limits(group.where)
    first = coordinates[mesh.axes[0].name] if mesh.axes else np.zeros(1, np.int64)
    held = np.ones(len(first), np.int64)
    label, position = np.zeros_like(held), np.zeros_like(held)
    for axis in mesh.axes:
        here, limit = coordinates[axis.name], limits[axis.name]
        held &= (here >= limit.start) & (here < limit.stop)
        if axis.name in group.axes:
            position = position * axis.size + here
        else:
            label = label * axis.size + here
    return held, label, position


def _find_peers(spread: _Spread, offset: int, node: Ints) -> None:
    peer = np.full(len(node), -1)
    peer[spread.members] = np.roll(spread.members, -offset, axis=1)
    spread.peer[offset] = peer
    spread.far[offset] = np.where(peer < 0, -1, node[peer] != node)


def _traits(
    schedule: Schedule,
    coordinates: dict[str, Ints],
    spreads: dict[str, _Spread],
    bundle: Ints,
) -> Ints:
    """One row per rank of what tells it from others before anyone is met."""
    mesh = schedule.mesh
    rows = [np.bincount(bundle)[bundle]]
    if len(schedule.roles) > 1:
        role = np.zeros(len(bundle), np.int64)
        for index, ranks in enumerate(schedule.roles):
            for box in ranks.boxes:
                limits = mesh.limits(box)
                inside = np.ones(len(bundle), bool)
                for name, limit in limits.items():
                    inside &= (coordinates[name] >= limit.start) & (coordinates[name] < limit.stop)
                role[inside] = index
        rows.append(role)
    for spread in spreads.values():
        rows += [spread.on_node, spread.nodes, *spread.far.values()]
    return np.stack(rows, axis=1)


def _refined(traits: Ints, spreads: dict[str, _Spread], bundle: Ints) -> Ints:
    """The coarsest colouring finer than the traits in which like ranks meet like ranks."""
    if bool((traits == traits[0]).all()):
        return np.zeros(len(traits), np.int64)
    colour = _numbered(traits)
    while True:
        rows = [colour, _meeting(colour, bundle, len(colour))]
        for spread in spreads.values():
            rows.append(_meeting(colour, spread.communicator, len(colour)))
            rows += [np.where(peer < 0, -1, colour[peer]) for peer in spread.peer.values()]
        finer = _numbered(np.stack(rows, axis=1))
        if finer.max() == colour.max():
            return colour
        colour = finer


def _numbered(rows: Ints) -> Ints:
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _meeting(colour: Ints, place: Ints, count: int) -> Ints:
    """By rank, a number for the colours that meet at its place: communicator or NIC."""
    meeting: dict[int, list[int]] = {}
    for rank in range(count):
        meeting.setdefault(int(place[rank]), []).append(int(colour[rank]))
    numbers: dict[tuple[int, ...], int] = {}
    by_place = {
        where: -1 if where < 0 else numbers.setdefault(tuple(sorted(colours)), len(numbers))
        for where, colours in meeting.items()
    }
    return np.array([by_place[int(place[rank])] for rank in range(count)])


def _by_first_rank(colour: Ints) -> tuple[Ints, list[int], list[int]]:
    """Class of each rank, and by class its first rank and how many; numbered by first rank."""
    _, firsts, inverse, counts = np.unique(
        colour, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(firsts)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], firsts[order].tolist(), counts[order].tolist()


def _classes(
    schedule: Schedule,
    index_of: Ints,
    sizes: tuple[list[int], list[int]],
    spreads: dict[str, _Spread],
) -> tuple[tuple[RankClass, ...], tuple[CommunicatorClass, ...]]:
    firsts, counts = sizes
    communicators: list[CommunicatorClass] = []
    of_rank_class: list[dict[str, CommunicatorClass]] = [{} for _ in firsts]
    for name, spread in spreads.items():
        for classes, where, count in _alike(index_of[spread.members]):
            made = CommunicatorClass(
                index=len(communicators),
                group=name,
                classes=classes,
                ranks=spread.members.shape[1],
                nodes=int(spread.nodes[spread.members[where][0]]),
                count=count,
            )
            communicators.append(made)
            for index in made.classes:
                of_rank_class[index][name] = made
    ranks = tuple(
        RankClass(
            index=index,
            program=schedule.program_of(rank),
            rank=rank,
            count=count,
            communicators=of_rank_class[index],
            shares=_shares(rank, spreads),
            peers=_peers(rank, spreads, index_of),
        )
        for index, (rank, count) in enumerate(zip(firsts, counts, strict=True))
    )
    return ranks, tuple(communicators)


def _alike(classes: Ints) -> list[tuple[tuple[int, ...], int, int]]:
    """Communicators (rows) with the same classes: those, the first such row, and how many."""
    if not classes.any():
        return [((0,), 0, len(classes))]
    firsts: dict[bytes, int] = {}
    counts: dict[bytes, int] = {}
    ordered = np.sort(classes, axis=1)
    for where, row in enumerate(ordered):
        key = row.tobytes()
        firsts.setdefault(key, where)
        counts[key] = counts.get(key, 0) + 1
    return [
        (tuple(dict.fromkeys(ordered[where].tolist())), where, counts[key])
        for key, where in firsts.items()
    ]


def _shares(rank: int, spreads: dict[str, _Spread]) -> dict[str, Fraction]:
    return {
        name: Fraction(1, int(spread.on_node[rank])) if spread.nodes[rank] > 1 else Fraction(0)
        for name, spread in spreads.items()
    }


def _peers(rank: int, spreads: dict[str, _Spread], index_of: Ints) -> dict[tuple[str, int], Peer]:
    return {
        (name, offset): Peer(
            rank_class=int(index_of[peer[rank]]), is_far=bool(spread.far[offset][rank])
        )
        for name, spread in spreads.items()
        for offset, peer in spread.peer.items()
        if peer[rank] >= 0
    }


def _nics(index_of: Ints, bundle: Ints, per_nic: Fraction) -> tuple[NicClass, ...]:
    """NIC classes: bundles of `1 / per_nic` NICs that serve ranks of the same classes."""
    class_count = int(index_of.max()) + 1
    table = np.bincount(bundle * class_count + index_of, minlength=class_count)
    padded = np.zeros(-(-len(table) // class_count) * class_count, np.int64)
    padded[: len(table)] = table
    rows, counts = np.unique(padded.reshape(-1, class_count), axis=0, return_counts=True)
    return tuple(
        NicClass(
            count=count / per_nic,
            ranks={
                index: rank_count * per_nic for index, rank_count in enumerate(row) if rank_count
            },
        )
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
        if any(row)
    )
