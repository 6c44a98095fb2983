"""A new communication, as it would stand in `zsim.schedule.communication`."""

from typing import ClassVar

from zsim.schedule.communication import ReducingOperation


class Reduce(ReducingOperation, frozen=True, kw_only=True):
    """`target` of member `root` is the reduction of all ranks' `source`; others' is undefined."""

    name: ClassVar[str] = "reduce"
    sends: ClassVar[str] = "its source to the root"
    root: int

    def addressed(self, members: int) -> tuple[int, ...]:
        """Return the number of the root."""
        return (self.root,) if self.root < members else ()
