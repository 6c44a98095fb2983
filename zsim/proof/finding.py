"""A finding of a check: one fault, with its place, reason and evidence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An invariant that a schedule breaks.

    Attributes:
        invariant: the family that found it: "lifetime", "matching", ...
        role: the role whose program it concerns, or the roles that disagree; empty for the whole
            schedule.
        operation: the id of the operation that breaks it, or the name of the layout or pool.
        why: one sentence.
        witness: lines of evidence: a cycle, two accesses, two sequences to compare.
    """

    invariant: str
    role: str
    operation: str
    why: str
    witness: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Role and operation in one text."""
        return f"{self.role}: {self.operation}" if self.role else self.operation
