"""Proofs of a schedule before it runs: order first, then values, then promises.

The families of order prove that every execution has the same result as the order of issue. Each
family has its own file, which states the claim, its assumptions, and its cost. Only then is one
step run on exact numbers (`values`). Properties that numbers cannot show are compared with the
contract.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zsim.gc_paused import uncollected
from zsim.model.model import Model
from zsim.proof import alignment, host_order, lifetime, matching, memory, progress, races, volume
from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.schedule.schedule import Schedule

if TYPE_CHECKING:
    from zsim.proof.values import Shown

__all__ = ["Finding", "Proof", "check", "prove"]

ORDER = {
    matching.INVARIANT: matching.examine,
    progress.INVARIANT: progress.examine,
    lifetime.INVARIANT: lifetime.examine,
    races.INVARIANT: races.examine,
    host_order.INVARIANT: host_order.examine,
}
"""Families that a run in the order of issue relies on; progress has two names."""

PROMISES = {
    memory.INVARIANT: memory.examine,
    volume.INVARIANT: volume.examine,
    alignment.INVARIANT: alignment.examine,
}
"""Families that compare with the promises of the contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Findings of a schedule, the properties proved, and those not promised or not shown.

    Attributes:
        findings: faults, in order of families.
        values: results of the proof of values; None if the order of operations is refuted.
        proved: families without findings, with their scope.
        not_shown: properties that were not checked, and why.
    """

    findings: tuple[Finding, ...]
    values: "Shown | None"
    proved: tuple[str, ...]
    not_shown: tuple[str, ...]


def prove(schedule: Schedule, model: Model | None = None, *, compares: bool = True) -> Proof:
    """Prove `schedule`: values only if the order of operations is proved.

    Without `compares`, prove only order and promises, on which times and memory depend.
    """
    from zsim.proof.statement import says

    with uncollected():
        context = Context.of(schedule, model)
        found, shown, ordered = _examined(context, compares=compares)
        broken = {finding.invariant for finding in found}
        proved, not_shown = says(schedule, shown, broken, ordered=ordered)
        return Proof(findings=tuple(found), values=shown, proved=proved, not_shown=not_shown)


def check(
    schedule: Schedule, model: Model | None = None, *, compares: bool = True
) -> tuple[Finding, ...]:
    """Return all findings of `schedule`; none if it is proved.

    Without `compares`, check only order and promises, on which times and memory depend.
    """
    with uncollected():
        found, _, _ = _examined(Context.of(schedule, model), compares=compares)
        return tuple(found)


def _examined(context: Context, *, compares: bool) -> "tuple[list[Finding], Shown | None, bool]":
    """Return all findings, the result of the proof of values, and whether order is proved."""
    found = [finding for examine in ORDER.values() for finding in examine(context)]
    ordered, shown = not found, None
    if ordered and compares:
        from zsim.proof.families import compared

        shown, found = compared(context)
    for examine in PROMISES.values():
        found += examine(context)
    return found, shown, ordered
