"""Values: every step is the step of plain training, by the contract's optimizer.

The step of all roles is run once in the order of issue on exact numbers, from any state of
training, and its result is compared with one step of `zsim.specification`.
`zsim.proof.execution.step_proof` describes the method, and why it holds for any number of steps.
It holds for the order of issue; the families of order prove that every other order has the same
result.

Cost: linear in the number of operations, for each path through a step; independent of the number
of ranks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter

from zsim.model.experts import LoadScope
from zsim.model.model import Model, Parameter
from zsim.proof.context import Context
from zsim.proof.execution.collective_runner import UnfollowedError
from zsim.proof.execution.constant_factors import divisors, seed_of
from zsim.proof.execution.fewer_micro_batches import with_fewer
from zsim.proof.execution.inferred_model import TENSOR, Training, model_of, training_of
from zsim.proof.execution.rows_as_places import in_places, kinds_of, model_in_places
from zsim.proof.execution.shortening import shortened
from zsim.proof.execution.step_proof import StepProof, StepResult, TooManyRanksError
from zsim.proof.finding import Finding
from zsim.proof.scalars import generic
from zsim.schedule.access import accesses
from zsim.schedule.operation import OF_SEGMENTS, Action, Compute, walk
from zsim.schedule.schedule import LogicalParameter, Schedule
from zsim.specification.residues import drawn_primes, modulo

INVARIANT = "values"

WITNESSES_MAX = 5
"""Maximum number of lines of a witness: further faults follow from the first."""

_SCOPES = {
    LoadScope.RANK: "rank",
    LoadScope.SEQUENCE: "sequence",
    LoadScope.MICRO_BATCH: "micro-batch",
    LoadScope.BATCH: "batch so far",
}

Proved = tuple[StepProof, StepResult]
"""A proof and its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Result of the proof of values.

    Attributes:
        findings: faults that refute the values.
        not_shown: why values were not checked; empty if they were.
        training: the training with which they were compared.
        routing: a text that says how rows of experts are routed; empty without experts.
        assumed: assumptions that the contract does not state.
        ranks: number of ranks of the schedule.
        classes: number of ranks that were run to represent them.
        error_bits: b; a wrong schedule passes with a probability below 2**-b.
        seed: of the primes and of all random numbers: a digest of the schedule.
    """

    findings: tuple[Finding, ...] = ()
    not_shown: str = ""
    training: Training | None = None
    routing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    ranks: int = 0
    classes: int = 0
    error_bits: int = 0
    seed: int = 0


def examine(context: Context) -> list[Finding]:
    """Find differences between a step and plain training."""
    return list(shown(context).findings)


def shown(context: Context, *, unfolded: bool = False) -> Shown:
    """Run a step and compare it with plain training; without a contract, only run it."""
    seed = seed_of(context.schedule)
    with modulo(drawn_primes(seed, divisors(context.schedule))):
        return _shown(context, seed, unfolded=unfolded)


def _shown(context: Context, seed: int, *, unfolded: bool) -> Shown:
    model = None if context.model is None else context.model.with_biases
    try:
        kinds = kinds_of(context.schedule, model)
    except UnfollowedError as error:
        return Shown(findings=(_finding("", "step", f"not followed: {error}"),))
    schedule = in_places(context.schedule, kinds)
    broken = [*_layouts(schedule), *_parameters(schedule, model)]
    if broken:
        return Shown(findings=tuple(broken))
    training = training_of(schedule) if schedule.contract.parameters else None
    model = None if model is None else model_in_places(context.schedule, model, kinds)
    assumed = [] if training is None else list(training.assumed)
    assumed += _assumed(schedule)
    if training is not None and model is None:
        model = model_of(schedule)
        assumed.append("the model, which is what the first micro-batch runs")
    not_shown = _unjudged(schedule, training, model, given=context.model is not None)
    unknown = "" if not_shown or model is None else _unknown(schedule, model)
    if unknown:
        why = "runs a segment that the model does not have"
        return Shown(findings=(_finding("", unknown, why),))
    try:
        if not_shown:
            proof = StepProof(schedule, None, None, seed=seed, unfolded=unfolded)
            outcome = StepResult(failures=proof.wander())
            if schedule.contract.parameters:
                outcome.differences = proof.unheld()
        else:
            found = None if unfolded else _by_induction(schedule, model, training, seed)
            if found is None:
                proof = StepProof(schedule, model, training, seed=seed, unfolded=unfolded)
                misfits = [*proof.misfits, *_copies(schedule, proof.model)]
                if misfits:
                    return Shown(findings=(_finding(*misfits[0]),))
                found = proof, proof.run(generic(schedule))
            proof, outcome = found
    except TooManyRanksError as error:
        return Shown(not_shown=str(error))
    except OverflowError:
        return Shown(not_shown="sizes are beyond 64 bits")
    except UnfollowedError as error:
        return Shown(findings=(_finding("", "step", f"not followed: {error}"),))
    classes = prod(len(along.coordinates) for along in proof.grid.tracked.values())
    return Shown(
        findings=tuple(_findings(schedule, outcome)),
        not_shown=not_shown,
        training=training,
        routing=() if not_shown else tuple(_routing(context.schedule, proof.model)),
        assumed=tuple(assumed),
        ranks=schedule.mesh.size,
        classes=classes,
        error_bits=outcome.error_bits,
        seed=seed,
    )


def _unjudged(
    schedule: Schedule, training: Training | None, model: Model | None, *, given: bool
) -> str:
    """Return why values cannot be compared with plain training, or ""."""
    if not schedule.contract.parameters:
        return "the contract names no parameters"
    if training is None:
        return "nothing is updated, and the contract names no strategy"
    biases = sorted(each.name for each in schedule.contract.parameters if each.load)
    if biases and not given:
        return f"no model is given, and {biases[0]} follows the load of experts"
    if model is None:
        return "no model is given, and forward could not be followed"
    return ""


def _routing(schedule: Schedule, model: Model) -> Iterator[str]:
    """Yield how a schedule routes the rows of experts, and what depends on their loads."""
    if schedule.counts:
        yield "any numbers of rows"
        if not schedule.contract.repeats_routing:
            yield "routing saved"
    segments = [segment for unit in model.units for segment in unit.segments]
    yield from dict.fromkeys(
        f"rows {each.drops} dropped" for each in segments if each.drops is not None
    )
    yield from dict.fromkeys(
        f"auxiliary loss of the {_SCOPES[each.loads]}"
        for each in segments
        if each.loads is not None
    )
    if model.loads:
        yield "biases of experts by the load of the step"


def _by_induction(
    schedule: Schedule, model: Model | None, training: Training | None, seed: int
) -> Proved | None:
    """Prove a schedule by one with fewer micro-batches or blocks; None if that is not possible."""
    if model is None or training is None or schedule.counts or any(_copies(schedule, model)):
        return None
    if _sums_batches(model):  # micro-batches differ
        return None
    fewer = with_fewer(schedule, training)
    if fewer is not None:
        few = fewer.schedule, model, fewer.training
        found = _by_blocks(*few, seed) or _run(*few, seed=seed)
        if found is not None:
            return found
    return _by_blocks(schedule, model, training, seed)


def _sums_batches(model: Model) -> bool:
    """Return True if an auxiliary loss depends on earlier micro-batches."""
    return any(each.loads is LoadScope.BATCH for unit in model.units for each in unit.segments)


def _by_blocks(schedule: Schedule, model: Model, training: Training, seed: int) -> Proved | None:
    """Prove a schedule with repeated blocks by one with fewer; None if that is not possible."""
    shorter = shortened(schedule, model)
    if shorter is None:
        return None
    left = training_of(shorter.schedule)
    if left is not None:
        left = replace(left, micro_batches=training.micro_batches)
    return _run(shorter.schedule, shorter.model, left, shorter.alike, seed=seed)


def _run(
    schedule: Schedule,
    model: Model,
    training: Training | None,
    alike: Sequence[Sequence[str]] = (),
    *,
    seed: int,
) -> Proved | None:
    """Run a schedule that represents a larger one; None if it is refuted, or does not."""
    try:
        proof = StepProof(schedule, model, training, seed=seed)
        outcome = None if proof.misfits else proof.run(generic(schedule))
    except (TooManyRanksError, UnfollowedError, OverflowError):
        return None
    if outcome is None or outcome.failures or outcome.differences:
        return None
    return (proof, outcome) if proof.stands_for_more(alike) else None


def _finding(role: str, operation: str, why: str, *witness: str) -> Finding:
    return Finding(invariant=INVARIANT, role=role, operation=operation, why=why, witness=witness)


def _layouts(schedule: Schedule) -> Iterator[Finding]:
    """Find layouts whose pieces are outside, overlap, or are in several blocks."""
    for layout in schedule.layouts:
        end, blocks = 0, layout.blocks or ()
        for piece in sorted(layout.pieces, key=attrgetter("start", "size")):
            name = piece.parameter
            if piece.end > layout.elements:
                why = f"{name} ends at {piece.end}, past its {layout.elements} elements"
                yield _finding("", layout.name, why)
            if piece.size and piece.start < end:
                yield _finding("", layout.name, f"{name} begins at {piece.start}, inside another")
            if bisect_right(blocks, piece.start) < bisect_left(blocks, piece.end):
                yield _finding("", layout.name, f"{name} lies in two blocks")
            end = max(end, piece.end)
        if layout.cuts and (layout.cuts[0], layout.cuts[-1]) != (0, layout.elements):
            first, last = layout.cuts[0], layout.cuts[-1]
            why = f"its cuts go from {first} to {last}, not from 0 to {layout.elements}"
            yield _finding("", layout.name, why)


def _parameters(schedule: Schedule, model: Model | None) -> Iterator[Finding]:
    """Find parameters of layouts or of the model that differ from the contract."""
    strategy = schedule.contract.strategy
    promised = {each.name: _described(each) for each in schedule.contract.parameters}
    if not promised:
        return
    if model is not None:
        apart = strategy is None or strategy.has_expert_order
        known = {
            each.name: _described(each if apart else replace(each, experts=0))
            for each in model.parameters
        }
        for name in sorted(promised.keys() | known.keys()):
            here, there = (each.get(name, "no such parameter") for each in (promised, known))
            if here != there:
                why = f"{name}: the contract has {here}, the model {there}"
                yield _finding("", "contract", why)
    used = {buffer.layout for program in schedule.programs for buffer in program.buffers}
    for layout in schedule.layouts:
        for piece in layout.pieces if layout.name in used else ():
            if piece.parameter not in promised:
                why = f"holds {piece.parameter}, which the contract does not name"
                yield _finding("", layout.name, why)


def _described(parameter: LogicalParameter | Parameter) -> str:
    kinds = f"{', frozen' if parameter.frozen else ''}{', of experts' if parameter.expert else ''}"
    load = f", which follows {parameter.load}" if parameter.load else ""
    return f"{parameter.elements} elements{kinds}{load}"


def _copies(schedule: Schedule, model: Model) -> Iterator[tuple[str, str, str]]:
    """Find initial values that are equal on ranks with different parts, or differ on copies."""
    experts = {each.name for each in schedule.contract.parameters if each.expert}
    sharded = {
        each.name: each.tensor_sharded for each in model.parameters if each.name not in experts
    }
    for program in schedule.programs if model.tensor > 1 else ():
        for operation in program.setup:
            if not isinstance(operation, Compute) or operation.action is not Action.INITIALIZE:
                continue
            for operand in operation.operands:
                layout = program.by_name[operand.view.buffer].layout
                for piece in () if layout is None else schedule.layout_by_name[layout].pieces:
                    if (TENSOR in piece.copies) is sharded.get(piece.parameter):
                        one, other = ("parts", "copies")[:: 1 if sharded[piece.parameter] else -1]
                        what = f"begins {piece.parameter} as {other} on the ranks of {TENSOR}"
                        yield program.role, operation.id, f"{what}, which hold {one}"


def _assumed(schedule: Schedule) -> Iterator[str]:
    if schedule.contract.repeats_routing:
        yield "routers that recomputation runs again, which choose the same experts"
    if any(
        isinstance(operation, Compute) and operation.action is Action.COMPRESS
        for program in schedule.programs
        for operation in program.patterns
    ):
        yield "factors of gradients that lose nothing, and errors that add up to zero"


def _unknown(schedule: Schedule, model: Model) -> str:
    """Return the first operation that runs a segment that the model does not have, or ""."""
    segments = {(unit.name, n) for unit in model.units for n in range(len(unit.segments))}
    for program in schedule.programs:
        for operation in program.patterns:
            if (
                isinstance(operation, Compute)
                and operation.action in OF_SEGMENTS
                and (operation.unit, operation.segment) not in segments
            ):
                return operation.id
    return ""


def _findings(schedule: Schedule, outcome: StepResult) -> list[Finding]:
    """Return one finding per cause: the first departure of a schedule from plain training."""
    if outcome.failures:
        ((role, operation), why), *others = outcome.failures.items()
        more = (f"then {where[1]} {what}" for where, what in others[:WITNESSES_MAX])
        return [_finding(role, operation, why, *more)]
    if not outcome.differences:
        return []
    first = outcome.differences[0]
    witness = [
        f"rank {each.rank}: {each.buffer or 'no buffer'} holds {each.why}"
        + (f", as {each.parameter}" if each.parameter else "")
        for each in outcome.differences[:WITNESSES_MAX]
    ]
    if not outcome.departures:
        if not first.buffer:
            return [_finding("", "step", f"{first.parameter}: {first.why}")]
        why = f"leaves {first.why} in {first.buffer}"
        last = _writer(schedule, first.role, first.buffer)
        return [_finding(first.role, last or "step", why, *witness)]
    left = outcome.departures[0]
    why = f"reads another {left.operand} in {left.buffer} than plain training does"
    return [_finding(left.role, left.operation, why, *witness)]


def _writer(schedule: Schedule, role: str, buffer: str) -> str:
    """Return the last operation of a role's step that writes a buffer."""
    found = ""
    for program in schedule.programs:
        for operation in walk(program.step) if program.role == role else ():
            if any(each.writes and each.view.buffer == buffer for each in accesses(operation)):
                found = operation.id
    return found
