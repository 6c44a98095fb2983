"""The result of a proof as text: its scope, and what it does not show."""

from collections.abc import Iterator, Set

from zsim.proof import scalars, values
from zsim.proof.families import of_stage
from zsim.proof.family import Stage
from zsim.proof.values import Shown
from zsim.schedule.operation import Action, Compute, Fill
from zsim.schedule.schedule import Place, Schedule


def says(
    schedule: Schedule, shown: Shown | None, broken: Set[str], *, ordered: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the properties proved, and those not shown.

    Args:
        schedule: the schedule that was checked.
        shown: result of the proof of values, if it was run.
        broken: families with findings.
        ordered: whether order is proved.
    """
    proved, not_shown = [], list(_unpromised(schedule))
    if ordered:
        proved += ["order", *_words(Stage.ORDER, schedule, broken)]
    if shown is None:
        why = "not asked for" if ordered else "the order of operations is refuted"
        not_shown.insert(0, f"values: {why}")
    else:
        if shown.not_shown:
            not_shown.insert(0, f"values: {shown.not_shown}")
        elif values.INVARIANT not in broken:
            proved.append(f"values ({', '.join(_values(schedule, shown))})")
            not_shown += [f"taken as given: {each}" for each in shown.assumed]
        proved += _words(Stage.VALUES, schedule, broken)
    proved += _words(Stage.PROMISES, schedule, broken)
    return tuple(proved), tuple(not_shown)


def _words(stage: Stage, schedule: Schedule, broken: Set[str]) -> Iterator[str]:
    """Yield the words of the families of a stage that have no finding."""
    for family in of_stage(stage):
        if family.name not in broken and (words := family.proves(schedule)) is not None:
            yield words


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
        names = sorted({rule.summary for rule in training.rules.values()})
        *_, last = names
        rules = last if len(names) == 1 else f"{', '.join(names[:-1])} and {last}"
        groups = f" in {count} groups" if (count := len(set(training.rules.values()))) > 1 else ""
        said = schedule.contract.rules.keys() >= training.rules.keys()
        yield f"{rules}{groups}" + (" as the contract says" if said else "")
    yield f"error below 2^-{shown.error_bits} with seed {shown.seed:08x}"


def _unpromised(schedule: Schedule) -> Iterator[str]:
    contract = schedule.contract
    if contract.parameters and contract.strategy is None:
        yield "number formats: the contract names no strategy"
        yield from _of_no_precision(schedule)
    yield from _without_peak(schedule)
    if contract.wire_bytes is None:
        yield "volume: the contract promises none"
    places = {pool.place for pool in schedule.pools}
    if contract.host_bytes is None and Place.HOST in places:
        yield "copies from and to the host: the contract promises none"
    if contract.file_bytes is None and Place.NVME in places:
        yield "reads and writes of files: the contract promises none"


def _of_no_precision(schedule: Schedule) -> Iterator[str]:
    """Yield properties that depend on the unknown precision, and on tests of gradients."""
    computes = [
        each
        for program in schedule.programs
        for each in program.patterns
        if isinstance(each, Compute)
    ]
    if not any(each.action is Action.FINITE for each in computes):
        yield "overflow: the contract names no strategy, and nothing tests gradients"
    scales = any(each.scalars and each.action in scalars.SCALERS for each in computes)
    if scales or any(
        isinstance(each, Fill) and each.scalar
        for program in schedule.programs
        for each in program.patterns
    ):
        yield "loss scale: the contract names no strategy"


def _without_peak(schedule: Schedule) -> Iterator[str]:
    """Yield missing promises of peaks: of all, or of a pool in which a role has buffers."""
    promised = {(role, pool) for role, pool, _ in schedule.contract.peak_bytes}
    if not promised:
        yield "memory: the contract promises no peak"
        return
    for program in schedule.programs:
        for pool in sorted({buffer.pool for buffer in program.buffers}):
            if (program.role, pool) not in promised:
                yield f"memory: the contract promises no peak of pool {pool} on {program.role}"
