"""Record the allocations, frees and collectives of a rank.

Each operation's record is created once and stored with the step of each execution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from zsim.network.volume import ring_equivalent_bytes, transfer
from zsim.schedule.operation import Communication
from zsim.schedule.schedule import Program
from zsim.trace.trace import LedgerEntry, Transfer
from zsim_torch.execute.agreement import IssuedLog
from zsim_torch.execute.collectives import ProcessGroups

SETUP: Final = -1


@dataclass(slots=True)
class RankLedger:
    """Records of memory and collectives, in the order of issue, each with its step."""

    program: Program
    communicators: ProcessGroups
    issued: IssuedLog = field(default_factory=IssuedLog)
    _entries: list[tuple[int, LedgerEntry]] = field(default_factory=list[tuple[int, LedgerEntry]])
    _transfers: list[tuple[int, Transfer]] = field(default_factory=list[tuple[int, Transfer]])
    _logged: int = 0

    @property
    def entries(self) -> list[LedgerEntry]:
        """Return the records of allocations and frees."""
        return [replace(entry, step=step) for step, entry in self._entries]

    @property
    def transfers(self) -> list[Transfer]:
        """Return the records of issued collectives."""
        return [replace(line, step=step) for step, line in self._transfers]

    def entry(
        self, operation: str, buffer: str, sign: int, size_bytes: int | None = None
    ) -> LedgerEntry:
        """Return the record of `operation`, which allocates (`sign` 1) or frees (-1) `buffer`.

        By default the buffer has the size of the schedule.
        """
        booked = self.program.by_name[buffer]
        return LedgerEntry(
            operation=operation,
            step=SETUP,
            pool=booked.pool,
            buffer=buffer,
            kind=booked.kind,
            change_bytes=sign * (booked.size_bytes if size_bytes is None else size_bytes),
        )

    def transfer(self, member: Communication) -> Transfer:
        """Return the record of a collective."""
        count = len(self.communicators.member(member.group).ranks)
        return transfer(member, SETUP, ring_equivalent_bytes(member, count))

    def enter(self, step: int, entry: LedgerEntry) -> None:
        """Record an allocation or a free."""
        self._entries.append((step, entry))

    def hand_over(self, step: int, transfers: Sequence[Transfer]) -> None:
        """Record collectives that were issued as one."""
        self._transfers += [(step, line) for line in transfers]

    def end_step(self, step: int) -> None:
        """Add the step's collectives to the log that ranks compare at the end."""
        own = [line for _, line in self._transfers[self._logged :]]
        self.issued.add_step(step, own)
        self._logged = len(self._transfers)

    def forget(self) -> None:
        """Drop all records; the log of issued collectives stays."""
        self._entries.clear()
        self._transfers.clear()
        self._logged = 0
