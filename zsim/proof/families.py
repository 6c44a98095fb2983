"""The families of the proof, including families of other packages, and the text of its result.

A package registers a family as an entry point of the group "zsim.invariants": its name, and a
`Family`. It is checked after zsim's families of the same stage.

Modules of families that compare values are imported when one of them is checked: a simulation
asks only for order and promises.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

from zsim.entry_point import registered
from zsim.proof import (
    alignment,
    counted_rows,
    host_order,
    lifetime,
    matching,
    memory,
    progress,
    races,
    volume,
)
from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.schedule.operation import Action, Compute, Fill
from zsim.schedule.schedule import Place, Schedule
from zsim.units import format_bytes

if TYPE_CHECKING:
    from zsim.proof.values import Shown

GROUP = "zsim.invariants"


class ProofStage(StrEnum):
    """When a family is checked."""

    ORDER = "order"
    """First: a run in the order of issue relies on it."""
    VALUES = "values"
    """If the order is proved, and values are requested."""
    PROMISES = "promises"
    """Always, and last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An invariant of schedules.

    Attributes:
        name: name of the family in findings.
        stage: when it is checked.
        examine: returns the findings of a schedule.
        proves: returns the words about a schedule without findings, or None if the family
            does not apply to it.
    """

    name: str
    stage: ProofStage
    examine: Callable[[Context], list[Finding]]
    proves: Callable[[Schedule], str | None]


Proves = Callable[[Schedule], str | None]


def _cast(schedule: Schedule) -> bool:
    """Return True if weights or tokens are cast to 8-bit floats before they are gathered."""
    strategy = schedule.contract.strategy
    if strategy is not None and not strategy.execution.shares_scales:
        return False
    tokens = strategy is not None and strategy.casts_tokens
    return tokens or any(each.float8 for each in schedule.contract.parameters)


def _counts(schedule: Schedule) -> bool:
    """Return True if the host computes a scalar."""
    return not all(each.given for each in schedule.scalars)


def _memory(schedule: Schedule) -> str | None:
    """Return the words with the largest promised peak."""
    peaks = [peak for _, _, peak in schedule.contract.peak_bytes]
    if not peaks:
        return None
    limits = (
        f"no rank receives more than {each.maximum:,} rows of {each.name} in a layer "
        f"({each.maximum / max(1, each.sent):.3g} x mean)"
        for each in schedule.counts
        if not each.padded
    )
    words = " and ".join(limits)
    return f"memory {format_bytes(max(peaks))}{' while ' * bool(words)}{words}"


def bound_memory(proved: tuple[str, ...], peak_bytes: int, words: str) -> tuple[str, ...]:
    """Return properties in which that of memory also has the peak at the numbers of a binding."""
    return tuple(
        f"{each}; {format_bytes(peak_bytes)} as bound ({words})"
        if each.startswith("memory ")
        else each
        for each in proved
    )


def _if(words: str, applies: Callable[[Schedule], bool]) -> Proves:
    return lambda schedule: words if applies(schedule) else None


_ORDER = (matching, progress, lifetime, races, host_order, counted_rows)
"""In the order of their findings; progress finds two invariants. The proof calls them "order"."""

VALUES = "values"
"""Name of the family that runs a step on exact numbers."""

ROWS = (
    "rows of experts: the order of those of one source for one expert, and zeros in the gradient "
    "of an expert without rows"
)
"""What the proof of values cannot show, since such rows have one number."""

_VALUES: tuple[tuple[str, Proves], ...] = (
    ("zsim.proof.values", lambda _: None),  # described with the ranks and rules that were run
    ("zsim.proof.scalars", _if("host scalars", _counts)),
    ("zsim.proof.formats", _if("number formats", lambda one: one.contract.strategy is not None)),
    ("zsim.proof.scales", _if("scales of 8-bit floats", _cast)),
    ("zsim.proof.places", lambda _: "places"),
    ("zsim.proof.generators", _if("random numbers", lambda one: bool(one.generators))),
)
_PROMISES: tuple[tuple[ModuleType, Proves], ...] = (
    (memory, _memory),
    (volume, _if("volume", lambda one: one.contract.wire_bytes is not None)),
    (alignment, _if("alignment", lambda one: any(each.alignment > 1 for each in one.layouts))),
)


def _shipped(stage: ProofStage, module: ModuleType, proves: Proves) -> Family:
    return Family(name=module.INVARIANT, stage=stage, examine=module.examine, proves=proves)


def _imported_later(module: str, proves: Proves) -> Family:
    """Return the family of values in `module`, which has the name of its invariant."""

    def examine(context: Context) -> list[Finding]:
        found = import_module(module).examine
        return cast("Callable[[Context], list[Finding]]", found)(context)

    name = module.rpartition(".")[2]
    return Family(name=name, stage=ProofStage.VALUES, examine=examine, proves=proves)


SHIPPED = (
    *(_shipped(ProofStage.ORDER, module, lambda _: None) for module in _ORDER),
    *(_imported_later(module, proves) for module, proves in _VALUES),
    *(_shipped(ProofStage.PROMISES, module, proves) for module, proves in _PROMISES),
)


@cache
def families() -> Mapping[str, Family]:
    """Return every installed family by name.

    Raises:
        EntryPointError: a name is registered twice, or an object is no `Family`.
    """
    return registered(GROUP, Family, {each.name: each for each in SHIPPED})


def of_stage(stage: ProofStage) -> tuple[Family, ...]:
    """Return the families of a stage, in the order of their findings."""
    return tuple(each for each in families().values() if each.stage is stage)


def proved_properties(
    schedule: Schedule, shown: "Shown | None", broken: Set[str], *, ordered: bool
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
        proved += ["order", *_words(ProofStage.ORDER, schedule, broken)]
    if shown is None:
        why = "not asked for" if ordered else "the order of operations is refuted"
        not_shown.insert(0, f"values: {why}")
    else:
        if shown.not_shown:
            not_shown.insert(0, f"values: {shown.not_shown}")
        elif VALUES not in broken:
            proved.append(f"values ({', '.join(_values(schedule, shown))})")
            not_shown += [f"taken as given: {each}" for each in shown.assumed]
            not_shown += [ROWS] * bool(schedule.counts)
        proved += _words(ProofStage.VALUES, schedule, broken)
    proved += _words(ProofStage.PROMISES, schedule, broken)
    return tuple(proved), tuple(not_shown)


def _words(stage: ProofStage, schedule: Schedule, broken: Set[str]) -> Iterator[str]:
    """Yield the words of the families of a stage that have no finding."""
    for family in of_stage(stage):
        if family.name not in broken and (words := family.proves(schedule)) is not None:
            yield words


def _values(schedule: Schedule, shown: "Shown") -> Iterator[str]:
    ranks = f"{shown.ranks} rank{'s' if shown.ranks > 1 else ''}"
    if shown.classes < shown.ranks:
        ranks += f" by {shown.classes} classes"
    yield ranks
    roles = len(schedule.roles)
    yield f"{roles} role{'s' if roles > 1 else ''}"
    parameters = [each for each in schedule.contract.parameters if not each.load]
    if frozen := sum(each.frozen for each in parameters):
        yield f"{frozen} of {len(parameters)} parameters frozen"
    yield from shown.routing
    training = shown.training
    if training is not None:
        kinds = {rule for rule in training.rules.values() if not rule.of_loads}
        names = sorted({rule.summary for rule in kinds})
        *_, last = names
        rules = last if len(names) == 1 else f"{', '.join(names[:-1])} and {last}"
        groups = f" in {count} groups" if (count := len(kinds)) > 1 else ""
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
    from zsim.proof.scalars import SCALERS

    computes = [
        each
        for program in schedule.programs
        for each in program.patterns
        if isinstance(each, Compute)
    ]
    if not any(each.action is Action.FINITE for each in computes):
        yield "overflow: the contract names no strategy, and nothing tests gradients"
    scales = any(each.scalars and each.action in SCALERS for each in computes)
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
