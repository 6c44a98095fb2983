"""Check that the members of each communicator issued the same collectives, by name.

A transport compares kinds and sizes at most. If two ranks issue all-reduces of equal size in
different orders, Gloo and NCCL add up the wrong tensors without an error. After a run, therefore,
ranks exchange a digest of the collectives that they issued on each communicator. Where digests
differ, they exchange the names. This costs one small exchange per run and nothing during the run.

Programs of two roles may use two names for one collective. Two names are compared only if at least
one of them is in both programs. Sends and receives are named by one rank each, so they are not
compared.

Except for branches, all steps issue the same collectives. The log therefore stores the collectives
of a step once, with the range of consecutive steps that issued them, and does not grow with the
number of steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeVar, cast

from torch import distributed

from zsim.schedule.operation import Receive, Send
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Transfer
from zsim_torch.execute.collectives import communicators

Gathered = TypeVar("Gathered")

ONE_SIDED = (Send.name, Receive.name)


class DivergedError(RuntimeError):
    """Two ranks issued different operations as one collective."""


class Issued(NamedTuple):
    """A collective that a rank has issued: its name, and the step."""

    operation: str
    step: int

    def __str__(self) -> str:
        return f"{self.operation} in {f'step {self.step}' if self.step >= 0 else 'setup'}"


class _Repeated(NamedTuple):
    """Steps `first` to `end` (exclusive) issued the same operations."""

    operations: tuple[str, ...]
    first: int
    end: int


@dataclass(slots=True)
class IssuedLog:
    """The collectives that a rank has issued, by group and in order."""

    _groups: dict[str, list[_Repeated]] = field(default_factory=dict[str, list[_Repeated]])

    def add_step(self, step: int, transfers: Iterable[Transfer]) -> None:
        """Add the collectives that one step has issued."""
        names: dict[str, list[str]] = {}
        for transfer in transfers:
            if transfer.collective not in ONE_SIDED:
                names.setdefault(transfer.group, []).append(transfer.operation)
        for group, found in names.items():
            repeated, operations = self._groups.setdefault(group, []), tuple(found)
            last = repeated[-1] if repeated else None
            if last and (last.operations, last.end) == (operations, step):
                repeated[-1] = last._replace(end=step + 1)
            else:
                repeated.append(_Repeated(operations, step, step + 1))

    def digests(self) -> dict[str, str]:
        """Return a digest of the issued collectives, by group."""
        return {group: _digest(repeated) for group, repeated in self._groups.items()}

    def of(self, groups: Iterable[str]) -> dict[str, list[_Repeated]]:
        """Return the issued collectives of `groups`."""
        return {group: self._groups[group] for group in groups if group in self._groups}


def agree(schedule: Schedule, log: IssuedLog) -> None:
    """Raise DivergedError on every rank unless all ranks issued the same collectives.

    Every rank of the process group calls it. The message names the first two operations that
    differ.
    """
    if not distributed.is_initialized():
        return
    digests = _gather_objects(log.digests())
    suspects = [
        (group.name, ranks)
        for group in schedule.groups
        for ranks in communicators(schedule.mesh, group)
        if len({digests[rank].get(group.name) for rank in ranks}) > 1
    ]
    if not suspects:
        return
    everyone = _gather_objects(log.of({group for group, _ in suspects}))
    for group, ranks in suspects:
        first, *others = ranks
        for other in others:
            one, two = (_issued(everyone[rank].get(group, [])) for rank in (first, other))
            known = [schedule.program_of(rank).by_id.keys() for rank in (first, other)]
            found = difference(one, two, shared=set(known[0] & known[1]))
            if found is not None:
                raise DivergedError(
                    f"ranks diverge: collective {found.place + 1} of {group} was {found.one} on "
                    f"rank {first}, and {found.other} on rank {other}"
                )


class IssuedDifference(NamedTuple):
    """The first place at which two ranks issued different operations."""

    place: int
    one: Issued
    other: Issued


def difference(
    one: Iterable[Issued], two: Iterable[Issued], *, shared: set[str]
) -> IssuedDifference | None:
    """Return the first place at which two ranks issued different operations, or None."""
    for place, (mine, theirs) in enumerate(zip(one, two, strict=False)):
        names = {mine.operation, theirs.operation}
        if len(names) > 1 and names & shared:
            return IssuedDifference(place, mine, theirs)
    return None


def _issued(repeated: Iterable[_Repeated]) -> Iterator[Issued]:
    for operations, first, end in repeated:
        for step in range(first, end):
            yield from (Issued(operation, step) for operation in operations)


def _digest(repeated: Iterable[_Repeated]) -> str:
    return blake2b(repr([tuple(each) for each in repeated]).encode(), digest_size=16).hexdigest()


def _gather_objects(own: Gathered) -> list[Gathered]:
    """Gather an object from every rank; return the objects in the order of ranks."""
    found: list[Gathered | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return cast("list[Gathered]", found)
