"""The answer of a proof in words: what it holds for, and what it does not show."""

from collections.abc import Iterator, Set

from zsim.proof import (
    alignment,
    formats,
    generators,
    memory,
    places,
    scalars,
    scales,
    values,
    volume,
)
from zsim.proof.values import Shown
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD, Adam, Optimizer, Rate
from zsim.units import format_bytes


def says(
    schedule: Schedule, shown: Shown | None, broken: Set[str], *, ordered: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is proved, and what is not shown.

    Args:
        schedule: what was looked at.
        shown: what was shown of values, if they were looked at.
        broken: families with findings.
        ordered: whether order is proved.
    """
    proved, not_shown = [], list(_unpromised(schedule))
    if ordered:
        proved.append("order")
    if shown is None:
        why = "not asked for" if ordered else "the order of operations is refuted"
        not_shown.insert(0, f"values: {why}")
    else:
        if shown.not_shown:
            not_shown.insert(0, f"values: {shown.not_shown}")
        elif values.INVARIANT not in broken:
            proved.append(f"values ({', '.join(_values(schedule, shown))})")
            not_shown += [f"taken as given: {each}" for each in shown.assumed]
        counts = not all(each.given for each in schedule.scalars)
        if scalars.INVARIANT not in broken and counts:
            proved.append("host scalars")
        if formats.INVARIANT not in broken and schedule.contract.strategy is not None:
            proved.append("number formats")
        if scales.INVARIANT not in broken and _casts(schedule):
            proved.append("scales of 8-bit floats")
        if places.INVARIANT not in broken:
            proved.append("places")
        if generators.INVARIANT not in broken and schedule.generators:
            proved.append("random numbers")
    peaks = [peak for _, _, peak in schedule.contract.peak_bytes]
    if peaks and memory.INVARIANT not in broken:
        proved.append(f"memory {format_bytes(max(peaks))}")
    if schedule.contract.wire_bytes is not None and volume.INVARIANT not in broken:
        proved.append("volume")
    if alignment.INVARIANT not in broken and any(each.alignment > 1 for each in schedule.layouts):
        proved.append("alignment")
    return tuple(proved), tuple(not_shown)


def _casts(schedule: Schedule) -> bool:
    """Tell whether weights or tokens are cast to 8-bit floats before they are gathered."""
    strategy = schedule.contract.strategy
    tokens = strategy is not None and strategy.casts_tokens
    return tokens or any(each.float8 for each in schedule.contract.parameters)


def _values(schedule: Schedule, shown: Shown) -> Iterator[str]:
    ranks = f"{shown.ranks} rank{'s' if shown.ranks > 1 else ''}"
    if shown.classes < shown.ranks:
        ranks += f" by {shown.classes} classes"
    yield ranks
    roles = len(schedule.roles)
    yield f"{roles} role{'s' if roles > 1 else ''}"
    parameters = schedule.contract.parameters
    if frozen := sum(each.frozen for each in parameters):
        yield f"{frozen} of {len(parameters)} parameters frozen"
    training = shown.training
    if training is not None:
        names = sorted({_name(rule) for rule in training.rules.values()})
        *_, last = names
        rules = last if len(names) == 1 else f"{', '.join(names[:-1])} and {last}"
        groups = f" in {count} groups" if (count := len(set(training.rules.values()))) > 1 else ""
        yield f"{rules}{groups}" + ("" if training.assumed else " as the contract says")
    yield f"error below 2^-{shown.error_bits} with seed {shown.seed:08x}"


def _name(rule: Optimizer) -> str:
    match rule:
        case Adam(learning_rate=rate):
            return f"Adam {_rate(rate)}"
        case SGD(learning_rate=rate, momentum=momentum):
            return f"SGD {_rate(rate)}" + (f", momentum {momentum:g}" if momentum else "")


def _rate(rate: Rate) -> str:
    return f"with any {rate}" if isinstance(rate, str) else f"{rate:g}"


def _unpromised(schedule: Schedule) -> Iterator[str]:
    contract = schedule.contract
    if contract.parameters and contract.strategy is None:
        yield "number formats: the contract names no strategy"
    if not contract.peak_bytes:
        yield "memory: the contract promises no peak"
    if contract.wire_bytes is None:
        yield "volume: the contract promises none"
