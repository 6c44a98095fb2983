"""Hazards: two unordered uses of memory, and the missing edge between them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from zsim_record.clocks.access_history import RecordedAccess
from zsim_record.clocks.call_stack import CallStack, StackFrame
from zsim_record.clocks.stream_clock import StreamClocks


class HazardKind(StrEnum):
    """Kinds of hazards between two unordered uses of memory."""

    RACE = "race"
    """Two streams access the same bytes, and at least one writes."""
    HOST_RACE = "host race"
    """The host accesses bytes that a stream still reads or writes, or the reverse."""
    REUSE = "reuse"
    """The allocator may reuse memory while a stream still uses its previous block."""


class BlockKind(StrEnum):
    """Kinds of memory, each with its own allocator and contract."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """The block of a hazard: its label and size, and the stacks of its allocation and free."""

    label: str
    kind: BlockKind
    size: int
    home: str
    allocated: CallStack | None
    dropped: CallStack | None = None

    def __str__(self) -> str:
        home = f" on {self.home}" if self.home else ""
        return f"{self.label} ({self.kind}, {self.size} bytes){home}"


@dataclass(slots=True, eq=False)
class Hazard:
    """Two unordered uses of memory, seen `count` times for one cause."""

    kind: HazardKind
    earlier: RecordedAccess
    later: RecordedAccess
    block: BlockOrigin
    former: BlockOrigin | None = None
    """For `REUSE`, the previous block of the memory; `earlier` is a use of it."""
    last_wait: CallStack | None = None
    """Stack of the last wait of the later timeline for the earlier one: it came too early."""
    count: int = 1

    @property
    def missing_edge(self) -> str:
        """Return the edge that would fix the hazard, as text."""
        earlier, later = self.earlier, self.later
        after = f"{earlier.operation} on {earlier.timeline.name}"
        if self.kind is HazardKind.REUSE:
            former = self.former.home if self.former else later.timeline.name
            if former != earlier.timeline.name:
                return (
                    f"{former} must wait for {after} before the storage is dropped there, "
                    f"or record_stream({earlier.timeline.name}) must be called on it"
                )
            return (
                f"{later.timeline.name} must wait for {former}, where the memory was allocated, "
                f"before {later.operation}"
            )
        if later.timeline.is_host:
            return f"the host must wait for {after} before {later.operation}"
        return f"{later.timeline.name} must wait for {after} before {later.operation}"


Site = tuple[StackFrame, ...]


@dataclass(slots=True)
class HazardList:
    """Hazards found so far, one per cause.

    After a hazard, its missing edge is assumed to exist, so other accesses that this edge would
    order are not reported. If `assumes` is False, clocks contain only recorded edges. Hazards of
    one kind between the same two lines of code count as one.
    """

    clocks: StreamClocks
    site_of: Callable[[CallStack | None], Site]
    """Returns the frames by which two code locations are compared."""
    assumes: bool = True
    _found: dict[tuple[object, ...], Hazard] = field(
        default_factory=dict[tuple[object, ...], Hazard]
    )

    def __iter__(self) -> Iterator[Hazard]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def add(self, hazard: Hazard) -> None:
        """Add a hazard, and continue as if its missing edge existed."""
        earlier, later = hazard.earlier, hazard.later
        if self.assumes:
            self.clocks.assume(later.timeline, earlier.tick, earlier.clock)
        key = (
            hazard.kind,
            earlier.timeline.name,
            later.timeline.name,
            self.site_of(earlier.stack),
            self.site_of(later.stack),
        )
        known = self._found.setdefault(key, hazard)
        if known is not hazard:
            known.count += 1
