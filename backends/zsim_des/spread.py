"""Where the communicators of each group lie: on which ranks, in which domains, in what order."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
from zsim.schedule import Schedule

Ints = npt.NDArray[np.int64]

Used = dict[str, list[int]]
"""By group the offsets of its Sends and Receives."""

COLLECTIVES = (AllGather, AllReduce, Broadcast, Receive, ReduceScatter, Send, Together)


@dataclass(slots=True)
class Spread:
    """Where the communicators of a group lie. Arrays by rank have -1 where it is in none.

    `members[i]` are the ranks of communicator i in order of position. In a ring the ranks of an
    NVSwitch domain stand next to each other, domains ascending: `before` has by rank a node of the
    domain before its own, at the same place there as the rank's node is in its own. `on_domain`
    is the number of members in the rank's domain, `domains` how many the communicator has.
    """

    name: str
    communicator: Ints
    members: Ints
    on_domain: Ints
    domains: Ints
    before: Ints
    peer: dict[int, Ints] = field(default_factory=dict[int, "Ints"])
    far: dict[int, Ints] = field(default_factory=dict[int, "Ints"])


def _coordinates(mesh: Mesh) -> dict[str, Ints]:
    """By axis the coordinate of each rank."""
    rest = np.arange(mesh.size)
    found: dict[str, Ints] = {}
    for axis in reversed(mesh.axes):
        rest, found[axis.name] = np.divmod(rest, axis.size)
    return found


def spreads(
    schedule: Schedule, used: Used, node: Ints, *, per_domain: int
) -> tuple[dict[str, Ints], list[Spread]]:
    """Coordinates by axis and rank, and where the `used` groups lie. `node` is by rank.

    A domain is `per_domain` nodes.
    """
    places = _coordinates(schedule.mesh)
    found: list[Spread] = []
    for name, offsets in used.items():
        group = schedule.group_by_name[name]
        members = _members(schedule.mesh, group, places)
        spread = _spread(name, members, node, per_domain=per_domain)
        for offset in offsets:
            peer = np.full(len(node), -1)
            peer[spread.members] = np.roll(spread.members, -offset, axis=1)
            domain = node // per_domain
            spread.peer[offset] = peer
            spread.far[offset] = np.where(peer < 0, -1, domain[peer] != domain)
        found.append(spread)
    return places, found


def used_groups(schedule: Schedule) -> Used:
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


def _spread(name: str, members: Ints, node: Ints, *, per_domain: int) -> Spread:
    ring = np.sort(members, axis=1)
    ring_node = node[ring]
    domain = ring_node // per_domain
    enters = domain != np.roll(domain, 1, axis=1)
    enters[:, 0] = True
    run = np.cumsum(enters).reshape(enters.shape) - 1
    first = np.maximum.accumulate(np.where(enters, np.arange(ring.shape[1]), 0), axis=1)
    earlier = np.take_along_axis(domain, first - 1, axis=1)
    before = np.minimum(ring_node + (earlier - domain) * per_domain, int(node[-1]))

    def by_rank(values: Ints) -> Ints:
        found = np.full(len(node), -1)
        found[ring] = values
        return found

    return Spread(
        name=name,
        communicator=by_rank(np.broadcast_to(np.arange(len(ring))[:, None], ring.shape)),
        members=members,
        on_domain=by_rank(np.bincount(run.ravel())[run]),
        domains=by_rank(np.broadcast_to(enters.sum(axis=1)[:, None], ring.shape)),
        before=by_rank(before),
    )


def _members(mesh: Mesh, group: Group, places: dict[str, Ints]) -> Ints:
    """The ranks of each communicator of a group, a row each, in order of position."""
    limits = mesh.limits(group.where)
    held = np.ones(mesh.size, bool)
    label, position = np.zeros(mesh.size, np.int64), np.zeros(mesh.size, np.int64)
    for axis in mesh.axes:
        here, limit = places[axis.name], limits[axis.name]
        held &= (here >= limit.start) & (here < limit.stop)
        if axis.name in group.axes:
            position = position * axis.size + here
        else:
            label = label * axis.size + here
    inside = np.flatnonzero(held)
    order = inside[np.lexsort((position[inside], label[inside]))]
    return order.reshape(-1, group.size(mesh))
