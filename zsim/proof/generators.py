"""Generators: every run of a segment with random numbers has its own mask, and keeps it.

Proved for every step: a forward draws with the next state of its generator; a recomputation
restores that state; and no other operation on any rank draws with it, except those of tensor ranks
that hold copies, which must. States of one generator on one rank differ from draw to draw. So the
proof checks which states are restored, and along which axes generators have different seeds: along
all axes on which ranks see other data or run other units, and along the tensor axis if segments
require it.

Assumed: seeds and states of different draws give independent numbers; the model says which
segments draw. Without a model, a segment that draws once must draw in every micro-batch and
recomputation.

Cost: linear in the number of computations; again for each pair of roles that share states.
"""

from collections.abc import Iterable, Iterator

from zsim.model.generator import Draws, Generator
from zsim.model.model import Segment
from zsim.proof.context import Context, NumberedProgram
from zsim.proof.finding import Finding
from zsim.schedule.mesh import Mesh
from zsim.schedule.operation import Action, Compute, Operation, walk
from zsim.schedule.schedule import RankRole

INVARIANT = "generators"
TENSOR = "tensor"

Segments = dict[tuple[str, int], Segment]


def examine(context: Context) -> list[Finding]:
    """Find draws with the state of another draw, and copies that do not share a state."""
    segments: Segments = {}
    if context.model is not None:
        segments = {
            (unit.name, place): segment
            for unit in context.model.units
            for place, segment in enumerate(unit.segments)
        }
    if not context.schedule.generators and not any(each.draws for each in segments.values()):
        return []
    drawing = _drawing(context) if context.model is None else frozenset()
    found = [
        finding
        for each in context.programs
        for finding in _program(context, each, segments, drawing)
    ]
    return [*found, *_roles(context)]


def _finding(role: str, operation: str, why: str) -> Finding:
    return Finding(invariant=INVARIANT, role=role, operation=operation, why=why)


def _drawing(context: Context) -> frozenset[tuple[str, int]]:
    """Return the segments that draw in some micro-batch of some role, so must in each."""
    return frozenset(
        (compute.unit, compute.segment)
        for each in context.programs
        for part in (each.program.setup, each.program.step)
        for compute in _unit_computes(part)
        if compute.draw is not None
    )


def _program(
    context: Context,
    each: NumberedProgram,
    segments: Segments,
    drawing: frozenset[tuple[str, int]],
) -> Iterator[Finding]:
    """Find draws of one role that differ from its segments, or from `drawing`."""
    generators = {generator.name: generator for generator in context.schedule.generators}
    strategy = context.schedule.contract.strategy
    micro_batches = None if strategy is None else strategy.train.gradient_accumulation_steps
    for part in (each.program.setup, each.program.step):
        always = {operation.id for operation in part}
        drawn: dict[str, Compute] = {}
        for compute in _unit_computes(part):
            segment = segments.get((compute.unit, compute.segment))
            draws = None if segment is None else segment.draws
            why = ""
            if compute.draw is None:
                if draws is not None or (compute.unit, compute.segment) in drawing:
                    why = "draws nothing, and its segment has random numbers"
            elif segments and draws is None:
                why = "draws random numbers, and its segment has none"
            elif compute.id not in always:
                why = "draws in a branch, so what is drawn next depends on its way"
            elif micro_batches is not None and compute.micro_batch >= micro_batches:
                why = f"draws for micro-batch {compute.micro_batch} of {micro_batches}"
            else:
                why = _restored(compute, drawn)
                why = why or _sharing_fault(context, generators[compute.draw.generator], draws)
                drawn[compute.id] = compute
            if why:
                yield _finding(each.program.role, compute.id, why)


def _unit_computes(part: Iterable[Operation]) -> Iterator[Compute]:
    for operation in walk(part):
        if isinstance(operation, Compute) and operation.action in (
            Action.FORWARD,
            Action.RECOMPUTE,
        ):
            yield operation


def _which(compute: Compute) -> tuple[str, int, int]:
    """Return unit, segment and micro-batch of an operation."""
    return compute.unit, compute.segment, compute.micro_batch


def _restored(compute: Compute, drawn: dict[str, Compute]) -> str:
    """Return the fault in the state with which an operation draws, or ""."""
    assert compute.draw is not None
    name = compute.draw.restores
    before = [each for each in drawn.values() if _which(each) == _which(compute)]
    if compute.action is Action.FORWARD:
        if name is not None:
            return f"draws with the state that {name} has drawn with"
        return f"draws anew what {before[0].id} has drawn" if before else ""
    if name is None:
        return "draws anew where its forward is run again"
    first = drawn.get(name)
    if first is None:
        return f"restores the state of {name}, which has not drawn yet"
    assert first.draw is not None
    if first.draw.generator != compute.draw.generator:
        return f"restores a state of {first.draw.generator} into {compute.draw.generator}"
    if first not in before or first.draw.restores is not None:
        return f"restores the state of {name}, which is not its forward"
    return ""


def _sharing_fault(context: Context, generator: Generator, draws: Draws | None) -> str:
    """Return the fault in sharing of states between ranks along some axis, or ""."""
    for axis in context.schedule.mesh.axes:
        if axis.size == 1:
            continue
        apart = axis.name in generator.axes
        if axis.name == TENSOR and draws is not None:
            if apart and draws is Draws.ALIKE:
                return f"ranks along {axis.name} draw apart from {generator.name} and hold copies"
            if not apart and draws is Draws.APART:
                return f"ranks along {axis.name} draw alike from {generator.name} and hold parts"
        elif axis.name != TENSOR and not apart:
            return f"ranks along {axis.name} draw alike from {generator.name} for different data"
    return ""


def _roles(context: Context) -> Iterator[Finding]:
    """Find roles that share states of a generator and draw with them in different orders."""
    schedule = context.schedule
    by_name = {each.program.role: each for each in context.programs}
    for generator in schedule.generators:
        for place, role in enumerate(schedule.roles):
            for other in schedule.roles[:place]:
                if not _share(schedule.mesh, generator, role, other):
                    continue
                mine, theirs = (_order(by_name[each.name], generator) for each in (role, other))
                if mine != theirs:
                    pairs = zip([*mine, None], [*theirs, None], strict=False)
                    first = next(one or two for one, two in pairs if one != two)
                    why = f"draws from {generator.name} in another order than {other.name}"
                    yield _finding(role.name, " ".join(map(str, first or ())), why)


def _share(mesh: Mesh, generator: Generator, one: RankRole, other: RankRole) -> bool:
    """Return True if a rank of one role and a rank of the other have the same states."""
    return any(
        mesh.boxes_meet(
            tuple(span for span in first if span.axis in generator.axes),
            tuple(span for span in second if span.axis in generator.axes),
        )
        for first in one.boxes
        for second in other.boxes
    )


def _order(each: NumberedProgram, generator: Generator) -> list[Iterable[object]]:
    """Return the operations that draw with the next state of a generator, in order."""
    return [
        _which(compute)
        for part in (each.program.setup, each.program.step)
        for compute in _unit_computes(part)
        if compute.draw is not None
        and compute.draw.generator == generator.name
        and compute.draw.restores is None
    ]
