"""A finding of a check: one fault, where, why, and what shows it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An invariant that a schedule breaks.

    Attributes:
        invariant: the family that found it: "lifetime", "matching", ...
        role: whose program it is about, or the roles that disagree; empty for the whole schedule.
        operation: the id of the operation that breaks it, or the name of the layout or pool.
        why: one sentence.
        witness: lines that show it: a cycle, two accesses, two sequences side by side.
    """

    invariant: str
    role: str
    operation: str
    why: str
    witness: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Return role and operation in one."""
        return f"{self.role}: {self.operation}" if self.role else self.operation
