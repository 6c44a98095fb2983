"""A new communication, as it would stand in `zsim.schedule.communication`."""

from typing import ClassVar

from zsim.schedule.communication import CollectiveOperation


class AllToAll(CollectiveOperation, frozen=True, kw_only=True):
    """Block i of each rank's `source` goes to member i; `target` has a block from each member."""

    name: ClassVar[str] = "all_to_all"
    sends: ClassVar[str] = "block i of its source to member i"
    splits: ClassVar[bool] = True
    joins: ClassVar[bool] = True
    moves_in_place: ClassVar[bool] = False

    def addressed(self, members: int) -> tuple[int, ...]:
        """Return all members: each receives another block."""
        return tuple(range(members))
