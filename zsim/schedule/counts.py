"""Counts of rows as named sizes: how many rows a rank sends to an expert depends on the data.

A schedule declares a count with its maximum. Buffers whose rows are counted name the count and a
layer, never a number. A binding (`zsim.schedule.binding`) gives the numbers.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from msgspec import Struct

from zsim.model.experts import Drops


class RowIndex(StrEnum):
    """Indexes of a count: the rank that sends rows, and the expert that they are for."""

    SOURCE = "source"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCount:
    """Rows that each member of `group` sends to each of `experts`, by layer and micro-batch.

    Member j has the experts from j times `experts` / members on. Each member sends `sent` rows in
    total and receives at most `maximum`. With a `capacity`, it sends at most that number to an
    expert, and drops others. With `padded`, it sends equal numbers of rows to all
    experts, a capacity filled with zeros; then counts do not depend on data, and the host does not
    read them. With `drops`, rows beyond a capacity are dropped, and `sent` is the most
    that a member sends.
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset({"capacity"})

    name: str
    group: str
    experts: int
    sent: int
    maximum: int
    capacity: int = 0
    padded: bool = False
    drops: Drops | None = None


class Rows(Struct, frozen=True, kw_only=True, gc=False):
    """The rows of a buffer: counted by `count` in `layer`, each of `width` elements.

    With `own` the source, they are the rows that the rank sends, by expert. With `own` the expert,
    they are the rows that the rank receives, in the order of `order`, the outer index first. With
    several `parts`, they are the rows of this number of ranks, which hold parts of equal experts.
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset({"parts"})

    count: str
    layer: int = 0
    order: tuple[RowIndex, RowIndex] = (RowIndex.SOURCE, RowIndex.EXPERT)
    own: RowIndex
    width: int = 1
    parts: int = 1

    @property
    def outer(self) -> RowIndex:
        """The index by which the rows are cut: a single source has no other than the expert."""
        return RowIndex.EXPERT if self.own is RowIndex.SOURCE else self.order[0]


def rows_at_most(count: NamedCount, rows: Rows) -> int:
    """Return the elements of a buffer of `rows` at the maximum of its count."""
    return rows.parts * rows.width * (count.sent if rows.own is RowIndex.SOURCE else count.maximum)
