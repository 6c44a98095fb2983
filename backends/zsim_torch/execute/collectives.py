"""Issue the collectives of a schedule by calls of torch.distributed."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple, assert_never, cast

import torch
from torch import distributed
from torch.distributed.distributed_c10d import (
    _coalescing_manager,  # pyright: ignore[reportPrivateUsage]  # torch has no public one
)

from zsim.schedule.mesh import Group, Mesh
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communication,
    PointToPoint,
    Receive,
    ReduceScatter,
    Reduction,
    Send,
    StreamOperation,
    Together,
    listed,
)
from zsim_torch.execute.gloo_exchange import SUMS, Exchanged, GlooExchange, all_reduced
from zsim_torch.supervise.process_group import backends

Work = distributed.Work


class CollectiveError(RuntimeError):
    """A collective that cannot be issued."""


REDUCE_OPERATION = {
    Reduction.SUM: distributed.ReduceOp.SUM,
    Reduction.AVERAGE: distributed.ReduceOp.AVG,
    Reduction.MAX: distributed.ReduceOp.MAX,
}
assert set(REDUCE_OPERATION) == set(Reduction)


def _named(new: str, old: str) -> Callable[..., Any]:
    """Return a function of torch.distributed by its name in torch 2.13, or by its name before."""
    found = getattr(distributed, new, None) or getattr(distributed, old)
    return cast("Callable[..., Any]", found)


ALL_GATHER = _named("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = _named("reduce_scatter_single", "reduce_scatter_tensor")
ALL_TO_ALL = distributed.all_to_all_single
assert "async_op" in inspect.signature(ALL_GATHER).parameters


class OwnGroup(NamedTuple):
    """This rank's communicator of a group: all ranks, this rank's index, and the process group."""

    ranks: tuple[int, ...]
    place: int
    process_group: distributed.ProcessGroup | None

    def peer(self, offset: int) -> int:
        """Return the rank that is `offset` members further on, cyclically."""
        return self.ranks[(self.place + offset) % len(self.ranks)]

    def peers(self, operation: StreamOperation) -> tuple[int, ...]:
        """Return the ranks at the other ends of the messages that are issued with `operation`."""
        members = operation.members if isinstance(operation, Together) else (operation,)
        messages = (each for each in members if isinstance(each, PointToPoint))
        return tuple(sorted({self.peer(each.offset) for each in messages}))


class IssuedCollective(NamedTuple):
    """A collective with the flat tensors that it reads and writes."""

    operation: Communication
    source: torch.Tensor | None
    target: torch.Tensor | None


class ProcessGroups:
    """The process groups of a schedule, created in the same order on every rank.

    Without a default process group there is one rank, and each collective is a copy.
    """

    def __init__(
        self, mesh: Mesh, groups: tuple[Group, ...], rank: int, device: torch.device
    ) -> None:
        self.distributed = distributed.is_initialized()
        self.asynchronous = self.distributed and backends().get(device.type) == "gloo"
        self._exchange = GlooExchange()
        self._members: dict[str, OwnGroup] = {}
        self._made: list[distributed.ProcessGroup] = []
        own = mesh.coordinates(rank)
        for group in groups:
            for ranks in communicators(mesh, group):
                made = None
                if self.distributed:
                    made = distributed.new_group(list(ranks), group_desc=group.name)
                if rank in ranks:
                    # `new_group` returns an integer instead of a process group on a rank outside
                    # the group.
                    own_group = made if isinstance(made, distributed.ProcessGroup) else None
                    if own_group is not None:
                        self._made.append(own_group)
                    place = group.index(mesh, own)
                    self._members[group.name] = OwnGroup(ranks, place, own_group)

    def close(self) -> None:
        """Destroy the process groups made here."""
        for made in self._made:
            distributed.destroy_process_group(made)
        self._made.clear()

    def member(self, group: str) -> OwnGroup:
        """Return this rank's communicator of `group`.

        Raises:
            CollectiveError: the rank is not in the group.
        """
        if group not in self._members:
            raise CollectiveError(f"group {group}: this rank is not in it")
        return self._members[group]

    def issue(self, handed: Sequence[IssuedCollective]) -> list[Work | Exchanged]:
        """Issue collectives of one group, coalesced if the backend can; return the work handles.

        Gloo runs them in the background, so the caller waits on the handles. NCCL runs them in
        order on the current stream, so the list is empty except for coalesced sends and receives.
        """
        member = self.member(handed[0].operation.group)
        if not self.distributed:
            for one in handed:
                _copy_alone(one)
            return []
        if len(handed) > 1 and not self.asynchronous:
            return _issue_as_one(handed, member)
        works = [
            self._exchanged(one, member) or _hand_over(one, member, asynchronous=self.asynchronous)
            for one in handed
        ]
        return [work for work in works if work is not None]

    def _exchanged(self, one: IssuedCollective, member: OwnGroup) -> Exchanged | None:
        """Issue a Gloo collective by calls that copy less than torch's, or return None."""
        operation, source, target = one
        group = member.process_group
        if not self.asynchronous or group is None or len(member.ranks) == 1:
            return None
        if source is None or target is None:
            return None
        if isinstance(operation, AllGather):
            return self._exchange.all_gather(target, source, group)
        if isinstance(operation, ReduceScatter) and operation.reduction in SUMS:
            return self._exchange.reduce_scatter(target, source, group, operation.reduction)
        return None


def _issue_as_one(handed: Sequence[IssuedCollective], member: OwnGroup) -> list[Work | Exchanged]:
    if all(isinstance(one.operation, Send | Receive) for one in handed):
        return [*distributed.batch_isend_irecv([_point_to_point(one, member) for one in handed])]
    with _coalescing_manager(group=member.process_group, device=torch.device("cuda")):
        for one in handed:
            _hand_over(one, member, asynchronous=False)
    return []


def _point_to_point(handed: IssuedCollective, member: OwnGroup) -> distributed.P2POp:
    operation = handed.operation
    assert isinstance(operation, Send | Receive)
    sends = isinstance(operation, Send)
    tensor = handed.source if sends else handed.target
    assert tensor is not None
    return distributed.P2POp(
        distributed.isend if sends else distributed.irecv,
        tensor,
        peer=member.peer(operation.offset),
        group=member.process_group,
    )


def communicators(mesh: Mesh, group: Group) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each communicator of `group`, in the same order on every rank.

    The cost is linear in the total number of ranks.
    """
    limits = mesh.limits(group.where)
    firsts, members = [0], [0]  # first rank of each communicator, and offsets of its members
    for axis in mesh.axes:
        varies, choices = axis.name in group.axes, limits[axis.name]
        firsts = _farther(firsts, axis.size, (0,) if varies else choices)
        members = _farther(members, axis.size, choices if varies else (0,))
    for first in firsts:
        yield tuple(first + member for member in members)


def _farther(ranks: Sequence[int], size: int, choices: Sequence[int]) -> list[int]:
    """Return rank numbers extended by an inner axis of `size`, at each index in `choices`."""
    return [rank * size + choice for rank in ranks for choice in choices]


def _copy_alone(handed: IssuedCollective) -> None:
    source, target = handed.source, handed.target
    if source is None or target is None:
        raise CollectiveError(f"{handed.operation.id}: there is no other rank")
    if not _same(source, target):
        target.copy_(source)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() == other.storage_offset()
    )


def _hand_over(handed: IssuedCollective, member: OwnGroup, *, asynchronous: bool) -> Work | None:
    operation, source, target = handed
    group = member.process_group
    work: object
    match listed(operation):
        case AllGather():
            work = ALL_GATHER(target, source, group=group, async_op=asynchronous)
        case ReduceScatter(reduction=reduction):
            how = REDUCE_OPERATION[reduction]
            work = REDUCE_SCATTER(target, source, op=how, group=group, async_op=asynchronous)
        case AllReduce(reduction=reduction):
            assert source is not None
            assert target is not None
            if not _same(source, target):
                target.copy_(source)
            how = REDUCE_OPERATION[reduction]
            if asynchronous and group is not None:
                return all_reduced(target, group, how)
            work = distributed.all_reduce(target, op=how, group=group, async_op=asynchronous)
        case Broadcast(root=root):
            assert source is not None
            assert target is not None
            if member.place == root and not _same(source, target):
                target.copy_(source)
            first = member.ranks[root]
            work = distributed.broadcast(target, src=first, group=group, async_op=asynchronous)
        case AllToAll(sent=sent, received=came):
            splits = [*came] or None, [*sent] or None
            work = ALL_TO_ALL(target, source, *splits, group=group, async_op=asynchronous)
        case Send(offset=offset):
            assert source is not None
            send = distributed.isend if asynchronous else distributed.send
            work = send(source, dst=member.peer(offset), group=group)
        case Receive(offset=offset):
            assert target is not None
            receive = distributed.irecv if asynchronous else distributed.recv
            work = receive(target, src=member.peer(offset), group=group)
        case _ as unknown:
            assert_never(unknown)
    # Without `async_op` most return None; `recv` returns the source rank.
    return cast("Work | None", work) if asynchronous else None


def received(
    members: Sequence[Communication], place: int, sources: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the result for the member at `place`, given operations and inputs of all members."""
    match listed(members[place]):
        case AllGather():
            return torch.cat(list(sources))
        case ReduceScatter(reduction=reduction):
            return _reduction(reduction, [each.chunk(len(sources))[place] for each in sources])
        case AllReduce(reduction=reduction):
            return _reduction(reduction, sources)
        case Broadcast(root=root):
            return sources[root]
        case AllToAll():
            return torch.cat([*_blocks(members, place, sources)])
        case Send() | Receive():
            return sources[0]
        case _ as unknown:
            assert_never(unknown)


def _blocks(
    members: Sequence[Communication], place: int, sources: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the part of each source that goes to the member at `place`."""
    for member, source in zip(members, sources, strict=True):
        assert isinstance(member, AllToAll)
        yield source[member.block(place, len(members))]


def _reduction(reduction: Reduction, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    match reduction:
        case Reduction.SUM:
            return reduce(torch.add, parts)
        case Reduction.AVERAGE:
            return reduce(torch.add, parts) / len(parts)
        case Reduction.MAX:
            return reduce(torch.maximum, parts)
        case _:
            assert_never(reduction)
