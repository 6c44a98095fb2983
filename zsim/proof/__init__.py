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
from zsim.proof.context import Context
from zsim.proof.families import VALUES, ProofStage, of_stage, proved_properties
from zsim.proof.finding import Finding
from zsim.schedule.schedule import Schedule

if TYPE_CHECKING:
    from zsim.proof.values import Shown

__all__ = ["Finding", "Proof", "check", "prove"]


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
    with uncollected():
        context = Context.of(schedule, model)
        found = _findings(ProofStage.ORDER, context)
        ordered, shown = not found, None
        if ordered and compares:
            from zsim.proof import values

            shown = values.shown(context)
            found += shown.findings
            found += _findings(ProofStage.VALUES, context, but=VALUES)
        found += _findings(ProofStage.PROMISES, context)
        broken = {finding.invariant for finding in found}
        proved, not_shown = proved_properties(schedule, shown, broken, ordered=ordered)
        return Proof(findings=tuple(found), values=shown, proved=proved, not_shown=not_shown)


def _findings(stage: ProofStage, context: Context, *, but: str = "") -> list[Finding]:
    """Return the findings of the families of a stage but one."""
    examined = (each.examine(context) for each in of_stage(stage) if each.name != but)
    return [finding for found in examined for finding in found]


def check(
    schedule: Schedule, model: Model | None = None, *, compares: bool = True
) -> tuple[Finding, ...]:
    """Return all findings of `schedule`; none if it is proved.

    Without `compares`, check only order and promises, on which times and memory depend.
    """
    return prove(schedule, model, compares=compares).findings
