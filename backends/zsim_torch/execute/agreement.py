"""A check that the members of each communicator issued the same collectives, by name.

A transport compares kinds and sizes, if anything. All-reduces of equal size that two ranks issue in
different orders are added up across, with Gloo as with NCCL, and nothing is said. So when a run is
over, ranks tell each other a digest of what they issued on each communicator, and where digests
differ the names: one small exchange for a run, and nothing while it goes on.

Programs of two roles may have two names for one collective: two names are held against each other
where at least one of them is in both programs. Sends and receives are each named by their rank
alone, and left out.
"""

from collections.abc import Iterable, Sequence
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


Sequences = dict[str, list[Issued]]
"""What a rank has issued, by group."""


def agree(schedule: Schedule, transfers: Iterable[Transfer]) -> None:
    """Return if all ranks issued the same; every rank of the process group calls it.

    Raises:
        DivergedError: they did not, on every rank; it names the first two operations that differ.
    """
    if not distributed.is_initialized():
        return
    issued: Sequences = {}
    for transfer in transfers:
        if transfer.collective not in ONE_SIDED:
            found = issued.setdefault(transfer.group, [])
            found.append(Issued(transfer.operation, transfer.step))
    digests = _told({group: _digest(sequence) for group, sequence in issued.items()})
    suspects = [
        (group.name, ranks)
        for group in schedule.groups
        for ranks in communicators(schedule.mesh, group)
        if len({digests[rank].get(group.name) for rank in ranks}) > 1
    ]
    if not suspects:
        return
    names = {group for group, _ in suspects}
    everyone = _told({group: issued[group] for group in names & issued.keys()})
    for group, ranks in suspects:
        first, *others = ranks
        for other in others:
            one, two = (everyone[rank].get(group, []) for rank in (first, other))
            known = [schedule.program_of(rank).by_id.keys() for rank in (first, other)]
            place = difference(one, two, shared=set(known[0] & known[1]))
            if place is not None:
                raise DivergedError(
                    f"ranks diverge: collective {place + 1} of {group} was {one[place]} on rank "
                    f"{first}, and {two[place]} on rank {other}"
                )


def difference(one: Sequence[Issued], two: Sequence[Issued], *, shared: set[str]) -> int | None:
    """Find the first place at which two ranks issued different operations."""
    for place, (mine, theirs) in enumerate(zip(one, two, strict=False)):
        names = {mine.operation, theirs.operation}
        if len(names) > 1 and names & shared:
            return place
    return None


def _digest(sequence: Iterable[Issued]) -> str:
    names = "\n".join(f"{each.step} {each.operation}" for each in sequence)
    return blake2b(names.encode(), digest_size=16).hexdigest()


def _told(own: Told) -> list[Told]:
    """Return what every rank tells, by rank."""
    found: list[Told | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return cast("list[Told]", found)
