"""Hazards: two uses of memory that nothing orders, with the edge that is missing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from zsim_torch.clocks.access_history import RecordedAccess
from zsim_torch.clocks.call_stack import CallStack, StackFrame
from zsim_torch.clocks.stream_clock import StreamClocks


class HazardKind(StrEnum):
    """Kinds of hazards: two uses of memory that nothing orders."""

    RACE = "race"
    """Two streams touch the same bytes, one of them writes."""
    HOST_RACE = "host race"
    """The host touches bytes that a stream still reads or writes, or the reverse."""
    REUSE = "reuse"
    """The allocator may hand out memory again while a stream still uses what was there."""


class BlockKind(StrEnum):
    """Kinds of memory, each with an allocator and its contract."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """The block that a hazard is about: what it is, and who allocated and dropped it."""

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
    """Two uses of memory without an order, seen `count` times for one cause."""

    kind: HazardKind
    earlier: RecordedAccess
    later: RecordedAccess
    block: BlockOrigin
    former: BlockOrigin | None = None
    """For `REUSE` the block that was there before; `earlier` is a use of it."""
    last_wait: CallStack | None = None
    """Stack of the last wait of the later timeline for the earlier one: too early."""
    count: int = 1

    @property
    def missing_edge(self) -> str:
        """The order that would mend it."""
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
    """Hazards found so far, each cause once.

    After a hazard its missing edge is taken to be there, so what else that edge would order is no
    second finding, unless `assumes` is False: then clocks keep to what was recorded. Hazards of one
    kind between the same two lines of code are one.
    """

    clocks: StreamClocks
    site_of: Callable[[CallStack | None], Site]
    """The frames by which a reader tells one place from another."""
    assumes: bool = True
    _found: dict[tuple[object, ...], Hazard] = field(
        default_factory=dict[tuple[object, ...], Hazard]
    )

    def __iter__(self) -> Iterator[Hazard]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def add(self, hazard: Hazard) -> None:
        """Note a hazard, and go on as if its edge were there."""
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
