"""Placement of communicators: their ranks, domains and order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from zsim.backend.backend import RefusedError
from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.host_links import HostFlow, path
from zsim.schedule.mesh import Group, Mesh
from zsim.schedule.operation import Communication, Compute, Copy, Fill, PointToPoint, Together
from zsim.schedule.schedule import Schedule
from zsim_des.network.carried import flow_of

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Used:
    """Traffic that programs cause: offsets of Sends and Receives by group, and host-side flows.

    `rings` are the groups with collectives. `places` keeps placements by the size of a node and of
    a domain.
    """

    groups: dict[str, list[int]]
    rings: frozenset[str]
    host_flows: tuple[HostFlow, ...]
    places: dict[tuple[int, int], "Placement"] = field(
        default_factory=dict[tuple[int, int], "Placement"], compare=False, repr=False
    )

    def placed(self, schedule: Schedule, cluster: Cluster) -> "Placement":
        """Return coordinates by axis and rank, and the placement of the groups of `schedule`."""
        key = (cluster.gpus_per_node, cluster.nodes_per_domain)
        found = self.places.get(key)
        if found is None:
            domain = np.arange(schedule.mesh.size) // key[0] // key[1]
            found = self.places[key] = spreads(schedule, self.groups, domain)
        return found

    def need_hosts(self, cluster: Cluster) -> None:
        """Raise RefusedError unless nodes have the host-side hardware that a schedule needs.

        Raises:
            RefusedError: the hardware is missing or not described.
        """
        try:
            for flow in self.host_flows:
                path(cluster, flow)
        except ClusterError as error:
            raise RefusedError(str(error)) from None


@dataclass(slots=True)
class Flows:
    """Flows between ranks: flow i carries 1 / `divisor[i]` of the bytes that ring neighbours move.

    `owner` is the communicator, or the sending rank for Sends.
    """

    owner: Ints
    source: Ints
    target: Ints
    divisor: Ints

    def some(self, which: Ints) -> "Flows":
        """Return the flows with the numbers `which`."""
        return Flows(*(each[which] for each in self.all()))

    def all(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return owners, sources, targets and divisors."""
        return self.owner, self.source, self.target, self.divisor


@dataclass(slots=True)
class _Runs:
    """Runs: members of a communicator in one domain, adjacent in its ring. All runs, in order.

    `flat` has the ranks of all runs, `before` the previous run in each one's ring.
    """

    flat: Ints
    starts: Ints
    lengths: Ints
    owner: Ints
    before: Ints


@dataclass(slots=True)
class Spread:
    """Placement of a group's communicators. Arrays by rank have -1 for ranks in none of them.

    `members[i]` are the ranks of communicator i in order of position. `on_domain` is the number of
    members in the rank's NVSwitch domain, `domains` the number of domains of its communicator. In a
    ring, the ranks of a domain are adjacent, and domains ascend. It represents several interleaved
    rings: ring k leaves a domain at member k and enters the next at member k + 1. `inner` are flows
    within domains, each with all the bytes but those that leave; `outer` are flows between domains.
    `block` numbers the pair of domains of each flow of `outer`.
    """

    name: str
    communicator: Ints
    members: Ints
    on_domain: Ints
    domains: Ints
    inner: Flows
    outer: Flows
    block: Ints
    peer: dict[int, Ints] = field(default_factory=dict[int, "Ints"])
    far: dict[int, Ints] = field(default_factory=dict[int, "Ints"])


def _coordinates(mesh: Mesh) -> dict[str, Ints]:
    """Return by axis the coordinate of each rank."""
    rest = np.arange(mesh.size)
    found: dict[str, Ints] = {}
    for axis in reversed(mesh.axes):
        rest, found[axis.name] = np.divmod(rest, axis.size)
    return found


Placement = tuple[dict[str, Ints], list[Spread]]
"""Coordinates by axis and rank, and the placement of groups."""


def spreads(schedule: Schedule, used: Mapping[str, Sequence[int]], domain: Ints) -> Placement:
    """Return coordinates by axis and rank, and the placement of the `used` groups by `domain`."""
    places = _coordinates(schedule.mesh)
    found: list[Spread] = []
    for name, offsets in used.items():
        group = schedule.group_by_name[name]
        members = _members(schedule.mesh, group, places)
        spread = _spread(name, members, domain)
        for offset in offsets:
            peer = np.full(len(domain), -1)
            peer[spread.members] = np.roll(spread.members, -offset, axis=1)
            spread.peer[offset] = peer
            spread.far[offset] = np.where(peer < 0, -1, domain[peer] != domain)
        found.append(spread)
    return places, found


ON_ONE_RANK = (Compute, Copy, Fill)
MEETINGS = (Communication, Together)
"""Operations on one rank, and operations that involve several."""


def used_of(schedule: Schedule) -> Used:
    """Return the traffic of all programs of the schedule."""
    groups: dict[str, list[int]] = {}
    rings: set[str] = set()
    flows: set[HostFlow] = set()
    places = {pool.name: pool.place for pool in schedule.pools}
    has_host = len(set(places.values())) > 1
    for program in schedule.programs:
        for operation in chain(program.setup_work, program.step_work):
            if has_host and isinstance(operation, ON_ONE_RANK):
                flow = flow_of(operation, program, places)
                if flow is not None:
                    flows.add(flow)
            if not isinstance(operation, MEETINGS):
                continue
            members = operation.members if isinstance(operation, Together) else (operation,)
            for member in members:
                offsets = groups.setdefault(member.group, [])
                if not isinstance(member, PointToPoint):
                    rings.add(member.group)
                elif member.offset not in offsets:
                    offsets.append(member.offset)
    return Used(groups, frozenset(rings), tuple(sorted(flows)))


def _spread(name: str, members: Ints, domain: Ints) -> Spread:
    count, size = members.shape
    ring = np.sort(members, axis=1)
    ring_domain = domain[ring]
    enters = ring_domain != np.roll(ring_domain, 1, axis=1)
    enters[:, 0] = True
    flat = ring.ravel()
    starts = np.flatnonzero(enters)
    lengths = np.diff(starts, append=len(flat))
    run = np.cumsum(enters) - 1
    domains = enters.sum(axis=1)
    owner = starts // size

    def by_rank(values: Ints) -> Ints:
        found = np.full(len(domain), -1)
        found[flat] = values
        return found

    # The previous run in the communicator's ring.
    first = np.searchsorted(owner, np.arange(count))
    before = np.arange(len(starts)) - 1
    before[first] = first + domains - 1
    crosses = np.flatnonzero(domains[owner] > 1)
    outer, block = _outer(_Runs(flat, starts, lengths, owner, before), crosses)
    here = np.flatnonzero(lengths[run] > 1)
    after = np.arange(len(flat)) + 1
    after[starts + lengths - 1] = starts
    within = np.where(domains[owner[run[here]]] > 1, lengths[run[here]], 0)
    return Spread(
        name=name,
        communicator=by_rank(owner[run]),
        members=members,
        on_domain=by_rank(lengths[run]),
        domains=by_rank(domains[owner[run]]),
        inner=Flows(owner[run[here]], flat[here], flat[after[here]], within),
        outer=outer,
        block=block,
    )


def _outer(runs: _Runs, crosses: Ints) -> tuple[Flows, Ints]:
    """Return flows into each run of `crosses` from the previous one, and the run they enter.

    Ring k leaves at member k of the previous run and enters at member k + 1.
    """
    left, lengths = runs.before[crosses], runs.lengths
    rings = np.lcm(lengths[crosses], lengths[left])
    which = np.repeat(np.arange(len(crosses)), rings)
    ends = np.cumsum(rings)
    ring = np.arange(len(which)) - (ends - rings)[which]
    into, out_of = crosses[which], left[which]
    source = runs.flat[runs.starts[out_of] + ring % lengths[out_of]]
    target = runs.flat[runs.starts[into] + (ring + 1) % lengths[into]]
    return Flows(runs.owner[into], source, target, rings[which]), into


def _members(mesh: Mesh, group: Group, places: dict[str, Ints]) -> Ints:
    """Return the ranks of each communicator of a group, one row each, in order of position."""
    limits = mesh.limits(group.where)
    held = np.ones(mesh.size, bool)
    label, position = np.zeros(mesh.size, np.int64), np.zeros(mesh.size, np.int64)
    for axis in mesh.axes:
        here, limit = places[axis.name], limits[axis.name]
        held &= (here >= limit.start) & (here < limit.stop)
        held &= (here - limit.start) % limit.step == 0
        if axis.name in group.axes:
            position = position * axis.size + here
        else:
            label = label * axis.size + here
    inside = np.flatnonzero(held)
    order = inside[np.lexsort((position[inside], label[inside]))]
    return order.reshape(-1, group.size(mesh))
