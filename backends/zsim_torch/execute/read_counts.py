"""Numbers of rows that ranks exchange, as the host reads them in the middle of a step.

A schedule names counts; their numbers depend on data. `ReadCounts` reads them for a layer and a
micro-batch. From then on, buffers with counted rows have sizes, and exchanges have blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from msgspec.structs import replace

from zsim.schedule.counts import NamedCount, RowIndex, Rows
from zsim.schedule.mesh import Coordinates, Group
from zsim.schedule.operation import AllToAll, ReadCounts, View
from zsim.schedule.schedule import Program, Schedule


class CountError(RuntimeError):
    """Counts that the schedule does not allow; the message names the operation or buffer."""


class CountKey(NamedTuple):
    """The place of counts in a step."""

    name: str
    layer: int
    micro_batch: int


class Blocks(NamedTuple):
    """Rows that a rank sends to each member of its group, and receives from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, sent: torch.Tensor, received: torch.Tensor) -> "Blocks":
        """Return the blocks of rows `sent` to each expert, and `received` by source and expert."""
        by_member = sent.view(len(received), -1).sum(1)
        return cls(tuple(by_member.tolist()), tuple(received.sum(1).tolist()))

    def sized(self, exchange: AllToAll, rows: Rows, place: int) -> AllToAll:
        """Return `exchange` with these blocks; its source has `rows`, the rank is at `place`."""
        sent, received = self.sent, self.received
        if rows.own is RowIndex.EXPERT:  # rows go back to their sources
            sent, received = received, sent
        return replace(
            exchange,
            source=View(buffer=exchange.source.buffer, size=rows.width * sum(sent)),
            target=View(buffer=exchange.target.buffer, size=rows.width * sum(received)),
            sent=tuple(rows.width * each for each in sent),
            received=tuple(rows.width * each for each in received),
            kept=rows.width * sent[place],
        )


class CountedLine(NamedTuple):
    """Rows from each source to each expert of this rank, read in a step."""

    step: int
    key: CountKey
    rows: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class CountedRows:
    """Counts that this rank has read, and the micro-batches of buffers with counted rows.

    `lines` has the counts of all steps if the run keeps its trace, else of the last step.
    """

    schedule: Schedule
    program: Program
    coordinates: Coordinates
    lines: list[CountedLine] = field(default_factory=list[CountedLine])
    _counts: Mapping[str, NamedCount] = field(init=False)
    _groups: Mapping[str, Group] = field(init=False)
    _blocks: dict[CountKey, Blocks] = field(default_factory=dict[CountKey, Blocks])
    _batch: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._counts = {each.name: each for each in self.schedule.counts}
        self._groups = {each.name: each for each in self.schedule.groups}

    def rows(self, exchange: AllToAll) -> Rows | None:
        """Return the rows of the source of an exchange; None if they are not counted."""
        return self.program.by_name[exchange.source.buffer].rows if self._counts else None

    def read(
        self, operation: ReadCounts, values: torch.Tensor, sent: torch.Tensor | None, step: int
    ) -> torch.Tensor:
        """Keep the counts in `values`; return the rows of this rank's experts, by source.

        Either ranks have gathered the counts of all experts, or each rank has received the counts
        of its experts; then `sent` has the rows that this rank sends to each expert.

        Raises:
            CountError: a rank sends another number of rows than declared, or receives more.
        """
        count = self._counts[operation.count]
        group = self._groups[count.group]
        members = group.size(self.schedule.mesh)
        own = group.index(self.schedule.mesh, self.coordinates)
        found = values.clone().view(members, -1)  # its memory serves other layers, too
        if found.shape[1] == count.experts:
            sent = found[own]
            found = found.view(members, members, -1)[:, own]
        if sent is None:
            raise CountError(f"{operation.id}: no segment says which rows this rank sends")
        blocks = Blocks.of(sent, found)
        self._need_allowed(operation, count, blocks)
        key = CountKey(operation.count, operation.layer, operation.micro_batch)
        self._blocks[key] = blocks
        self.lines.append(CountedLine(step, key, tuple(map(tuple, found.tolist()))))
        return found

    @staticmethod
    def _need_allowed(operation: ReadCounts, count: NamedCount, blocks: Blocks) -> None:
        sent, received = sum(blocks.sent), sum(blocks.received)
        if sent > count.sent or (sent < count.sent and not count.capacity and count.drops is None):
            raise CountError(
                f"{operation.id}: this rank sends {sent} rows of {count.name}, the schedule "
                f"declares {count.sent}"
            )
        if received > count.maximum:
            raise CountError(
                f"{operation.id}: experts of this rank receive {received} rows in layer "
                f"{operation.layer}, the schedule has memory for {count.maximum}; raise "
                "experts.maximum"
            )

    def begin(self, buffer: str, micro_batch: int | None) -> None:
        """Note that `buffer` holds rows of this micro-batch from now on."""
        self._batch[buffer] = micro_batch or 0

    def elements(self, buffer: str) -> int | None:
        """Return the size of a buffer with counted rows; None before the counts are read."""
        rows = self.program.by_name[buffer].rows
        assert rows is not None
        blocks = self._known(rows, self._batch[buffer])
        if blocks is None:
            return None
        own = blocks.sent if rows.own is RowIndex.SOURCE else blocks.received
        return sum(own) * rows.width

    def _known(self, rows: Rows, micro_batch: int) -> Blocks | None:
        """Return the blocks of rows in a micro-batch; None before the counts are read.

        Blocks of experts that are filled up to a capacity are equal, and no rank reads them.
        """
        count = self._counts[rows.count]
        if not count.padded:
            return self._blocks.get(CountKey(rows.count, rows.layer, micro_batch))
        members = self._groups[count.group].size(self.schedule.mesh)
        each = (count.sent // members,) * members
        return Blocks(each, each)

    def sized(self, exchange: AllToAll) -> AllToAll:
        """Return `exchange` with the elements of each block.

        Raises:
            CountError: the counts were not read.
        """
        rows, batch = self.rows(exchange), self._batch[exchange.source.buffer]
        assert rows is not None
        blocks = self._known(rows, batch)
        if blocks is None:
            raise CountError(f"{exchange.id}: the counts of its rows were not read")
        place = self._groups[exchange.group].index(self.schedule.mesh, self.coordinates)
        return blocks.sized(exchange, rows, place)

    def begin_step(self) -> None:
        """Forget the numbers of the step before."""
        self._blocks.clear()

    def received_rows(self) -> tuple[tuple[int, ...], ...]:
        """Return the rows of this rank's experts as `RankTrace.rows`."""
        found: list[tuple[int, ...]] = []
        for line in self.lines:
            group = self._groups[self._counts[line.key.name].group]
            mesh = self.schedule.mesh
            first = group.index(mesh, self.coordinates) * len(line.rows[0])
            at = (line.step, line.key.micro_batch, line.key.layer, self._number(group))
            found += (
                (*at, source, first + place, rows)
                for source, row in enumerate(line.rows)
                for place, rows in enumerate(row)
                if rows
            )
        return tuple(found)

    def _number(self, group: Group) -> int:
        """Return the number of this rank's group, in the order of their first ranks."""
        mesh, seen = self.schedule.mesh, dict[tuple[int, ...], int]()
        for rank in range(mesh.size):
            seen.setdefault(group.members(mesh, mesh.coordinates(rank)), len(seen))
        return seen[group.members(mesh, self.coordinates)]

    def forget(self) -> None:
        """Drop the lines of finished steps."""
        self.lines.clear()
