"""What is proved of a schedule before it runs, one file for each family of invariants.

Cost grows with the programs, not with the number of ranks. Each family says in its module what it
proves, under which assumptions, and what it costs.
"""

from zsim.check import (
    completeness,
    definedness,
    issue_order,
    lifetime,
    matching,
    memory,
    partition,
    placement,
    progress,
    races,
    skip_path,
    uniformity,
    value,
    volume,
)
from zsim.check.finding import Finding
from zsim.check.subject import Subject
from zsim.garbage import uncollected
from zsim.model import Model
from zsim.schedule import Schedule

__all__ = ["FAMILIES", "Finding", "check"]

FAMILIES = {
    matching.INVARIANT: matching.examine,
    progress.INVARIANT: progress.examine,
    issue_order.INVARIANT: issue_order.examine,
    lifetime.INVARIANT: lifetime.examine,
    races.INVARIANT: races.examine,
    definedness.INVARIANT: definedness.examine,
    uniformity.INVARIANT: uniformity.examine,
    skip_path.INVARIANT: skip_path.examine,
    completeness.INVARIANT: completeness.examine,
    placement.INVARIANT: placement.examine,
    value.INVARIANT: value.examine,
    partition.INVARIANT: partition.examine,
    memory.INVARIANT: memory.examine,
    volume.INVARIANT: volume.examine,
}
"""Every family by the name that its findings carry."""


def check(schedule: Schedule, model: Model | None = None) -> tuple[Finding, ...]:
    """Everything that is wrong with `schedule`, family by family; nothing if it is proved."""
    with uncollected():
        subject = Subject.of(schedule, model)
        return tuple(finding for examine in FAMILIES.values() for finding in examine(subject))
