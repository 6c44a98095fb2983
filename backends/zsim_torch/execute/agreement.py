"""A check that the members of each communicator issued the same collectives, by name.

A transport compares kinds and sizes, if anything. All-reduces of equal size that two ranks issue in
different orders are added up across, with Gloo as with NCCL, and nothing is said. So when a run is
over, ranks tell each other a digest of what they issued on each communicator, and where digests
differ the names: one small exchange for a run, and nothing while it goes on.

Programs of two roles may have two names for one collective: two names are held against each other
where at least one of them is in both programs. Sends and receives are each named by their rank
alone, and left out.

Steps issue the same but for branches, so a log keeps what a step issued once, and then how many
steps in a row issued it: it does not grow with the steps.
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

Told = TypeVar("Told")

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
        """Add what one step has issued."""
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
        """Return a digest of what was issued, by group."""
        return {group: _digest(repeated) for group, repeated in self._groups.items()}

    def of(self, groups: Iterable[str]) -> dict[str, list[_Repeated]]:
        """Return what was issued on some groups."""
        return {group: self._groups[group] for group in groups if group in self._groups}


def agree(schedule: Schedule, log: IssuedLog) -> None:
    """Return if all ranks issued the same; every rank of the process group calls it.

    Raises:
        DivergedError: they did not, on every rank; it names the first two operations that differ.
    """
    if not distributed.is_initialized():
        return
    digests = _told(log.digests())
    suspects = [
        (group.name, ranks)
        for group in schedule.groups
        for ranks in communicators(schedule.mesh, group)
        if len({digests[rank].get(group.name) for rank in ranks}) > 1
    ]
    if not suspects:
        return
    everyone = _told(log.of({group for group, _ in suspects}))
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
    """Find the first place at which two ranks issued different operations."""
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


def _told(own: Told) -> list[Told]:
    """Return what every rank tells, by rank."""
    found: list[Told | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return cast("list[Told]", found)
