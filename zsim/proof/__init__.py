"""Proofs of a schedule before it runs: order first, then values, then what is promised.

The families of order say that every execution comes to what the order of issue comes to; each has
a file of its own, with what it proves, under which assumptions, and what it costs. Only then is one
step run on exact numbers (`values`). What numbers cannot show is compared with the contract.
"""

from dataclasses import dataclass

from zsim.gc_paused import uncollected
from zsim.model.model import Model
from zsim.proof import (
    alignment,
    formats,
    generators,
    host_order,
    lifetime,
    matching,
    memory,
    places,
    progress,
    races,
    scalars,
    scales,
    values,
    volume,
)
from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.proof.statement import says
from zsim.proof.values import Shown
from zsim.schedule.schedule import Schedule

__all__ = ["FAMILIES", "Finding", "Proof", "check", "prove"]

ORDER = {
    matching.INVARIANT: matching.examine,
    progress.INVARIANT: progress.examine,
    lifetime.INVARIANT: lifetime.examine,
    races.INVARIANT: races.examine,
    host_order.INVARIANT: host_order.examine,
}
"""Families without whose word a run in the order of issue shows nothing; progress has two names."""

VALUES = {
    values.INVARIANT: values.examine,
    scalars.INVARIANT: scalars.examine,
    formats.INVARIANT: formats.examine,
    scales.INVARIANT: scales.examine,
    places.INVARIANT: places.examine,
    generators.INVARIANT: generators.examine,
}
"""Families that compare with the specification."""

PROMISES = {
    memory.INVARIANT: memory.examine,
    volume.INVARIANT: volume.examine,
    alignment.INVARIANT: alignment.examine,
}
"""Families that compare with what the contract promises."""

FAMILIES = {**ORDER, **VALUES, **PROMISES}
"""Every family by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Findings of a schedule, what is proved of it, and what nobody promised or showed.

    Attributes:
        findings: what is wrong, in order of families.
        values: what was shown of values; None where the order of operations is refuted.
        proved: families without findings, with what they hold for.
        not_shown: what was not looked at, and why.
    """

    findings: tuple[Finding, ...]
    values: Shown | None
    proved: tuple[str, ...]
    not_shown: tuple[str, ...]


def prove(schedule: Schedule, model: Model | None = None, *, compares: bool = True) -> Proof:
    """Prove `schedule`: values only where the order of operations is proved.

    Without `compares` only what times and memory depend on is proved: order, and what is promised.
    """
    with uncollected():
        context = Context.of(schedule, model)
        found = [finding for examine in ORDER.values() for finding in examine(context)]
        ordered, shown = not found, None
        if ordered and compares:
            shown = values.shown(context)
            found += shown.findings
            found += scalars.examine(context)
            found += formats.examine(context)
            found += scales.examine(context)
            found += places.examine(context)
            found += generators.examine(context)
        for examine in PROMISES.values():
            found += examine(context)
        broken = {finding.invariant for finding in found}
        proved, not_shown = says(schedule, shown, broken, ordered=ordered)
        return Proof(findings=tuple(found), values=shown, proved=proved, not_shown=not_shown)


def check(
    schedule: Schedule, model: Model | None = None, *, compares: bool = True
) -> tuple[Finding, ...]:
    """Return everything that is wrong with `schedule`; nothing if it is proved.

    Without `compares` only what times and memory depend on is proved: order, and what is promised.
    """
    return prove(schedule, model, compares=compares).findings
