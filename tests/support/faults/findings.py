"""Findings of a proof, in the forms that tests compare."""

from zsim.model.model import Model
from zsim.proof import Finding, check
from zsim.schedule.schedule import Schedule


def named(schedule: Schedule, model: Model | None = None) -> list[tuple[str, str]]:
    """Return (invariant, operation) of every finding."""
    return [(each.invariant, each.operation) for each in check(schedule, model)]


def families(schedule: Schedule, model: Model | None = None) -> set[str]:
    """Return the invariants that have findings."""
    return {each.invariant for each in check(schedule, model)}


def left(schedule: Schedule, model: Model | None = None) -> str:
    """Return the operation where a schedule leaves plain training, with numbers that it wrote."""
    found = the_finding(schedule, "values", model)
    assert "nobody wrote" not in found.why
    return found.operation


def unwritten(schedule: Schedule, model: Model | None = None) -> str:
    """Return the first operation that computes with numbers that nobody wrote."""
    found = the_finding(schedule, "values", model)
    assert found.why.startswith("computes with")
    return found.operation


def the_finding(schedule: Schedule, invariant: str, model: Model | None = None) -> Finding:
    """Return the only finding of one family; other families may have their own."""
    (found,) = (each for each in check(schedule, model) if each.invariant == invariant)
    return found
