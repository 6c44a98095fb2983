"""Edits of training with experts written by hand: faults of frameworks, and steps that are right.

Each is named by the fault, and has a plan and the change. Whether it is wrong is for the oracle on
real rows to say.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from experts_by_hand import Plan
from faults.schedules import edited, moved, twice, without

from zsim.schedule.operation import (
    Action,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Copy,
    Fill,
    Operation,
    Reduction,
    View,
)
from zsim.schedule.replace import replace as changed
from zsim.schedule.schedule import Schedule

Edit = Callable[[Schedule], Schedule]
EP4 = Plan(ranks=4, experts=8)
D22 = Plan(ranks=2, data=2)
WHOLE = Plan(whole=True)
WHOLE22 = Plan(whole=True, data=2)


def every(schedule: Schedule, named: Callable[[str], bool], **fields: Any) -> Schedule:  # noqa: ANN401  # any field
    """Change fields of all operations with such a name; there is at least one."""
    found: list[str] = []

    def change(operation: Operation) -> Iterable[Operation]:
        if not named(operation.id):
            return (operation,)
        found.append(operation.id)
        values = {key: each(operation) if callable(each) else each for key, each in fields.items()}
        return (changed(operation, **values),)

    made = edited(schedule, change)
    assert found
    return made


def ending(*ends: str) -> Callable[[str], bool]:
    """Return a test for names that end like this."""
    return lambda name: name.endswith(ends)


def divided(factor: Callable[[Plan], float], what: str = "experts") -> Callable[[Plan], Edit]:
    """Divide gradients by another number."""

    def of(plan: Plan) -> Edit:
        def divisor(copy: Copy) -> int:
            made = copy.divisor * factor(plan)
            assert made == int(made)
            return int(made)

        return lambda schedule: every(
            schedule,
            lambda name: f"/{what}" in name and name.endswith("/add"),
            divisor=divisor,
        )

    return of


def reduced(what: str, **fields: object) -> Edit:
    """Change the reductions of some gradients."""
    return lambda schedule: every(
        schedule, lambda name: f"/{what}" in name and name.endswith("/reduce"), **fields
    )


def unreduced(what: str) -> Edit:
    """Leave out the reductions of some gradients."""

    def edit(schedule: Schedule) -> Schedule:
        (program,) = schedule.programs
        names = [
            each.id
            for each in program.step
            if isinstance(each, AllReduce) and f"/{what}" in each.id
        ]
        return without(schedule, *names)

    return edit


def reads(ending_of: str, action: Action, buffer: str, other: str) -> Edit:
    """Let segments of an action read or write another buffer of equal size."""

    def operands(compute: Compute) -> tuple[object, ...]:
        return tuple(
            changed(each, view=changed(each.view, buffer=other))
            if each.view.buffer == buffer
            else each
            for each in compute.operands
        )

    return lambda schedule: every(schedule, ending(f"{ending_of}/{action}"), operands=operands)


def zeroed(exchange: str) -> Edit:
    """Write zeros in place of an exchange."""

    def edit(schedule: Schedule) -> Schedule:
        def change(operation: Operation) -> Iterable[Operation]:
            if isinstance(operation, AllToAll | Copy) and operation.id.endswith(f"/{exchange}"):
                return (
                    Fill(
                        id=operation.id,
                        stream=operation.stream,
                        target=operation.target,
                        value=0.0,
                    ),
                )
            return (operation,)

        made = edited(schedule, change)
        assert made != schedule
        return made

    return edit


def sends(exchange: str, other: str) -> Edit:
    """Let an exchange of every layer send another buffer of the layer."""

    def source(operation: AllToAll) -> View:
        unit = operation.source.buffer.partition("/")[0]
        return changed(operation.source, buffer=f"{unit}/{other}")

    return lambda schedule: every(schedule, ending(f"/{exchange}"), source=source)


def left_out(*ends: str) -> Edit:
    """Leave out operations."""

    def edit(schedule: Schedule) -> Schedule:
        (program,) = schedule.programs
        names = [each.id for each in program.step if each.id.endswith(ends)]
        assert names
        return without(schedule, *names)

    return edit


def again(*ends: str, **fields: object) -> Edit:
    """Run operations twice."""

    def edit(schedule: Schedule) -> Schedule:
        (program,) = schedule.programs
        for name in [each.id for each in program.step if each.id.endswith(ends)]:
            schedule = twice(schedule, name, **fields)
        return schedule

    return edit


def broadcast_in_setup(schedule: Schedule) -> Schedule:
    """Give the experts of the first rank to all."""
    (program,) = schedule.programs
    view = View(buffer="experts0", size=program.by_name["experts0"].elements)
    one = Broadcast(
        id="setup/experts0/broadcast",
        stream="compute",
        group="ep",
        source=view,
        target=view,
        root=0,
        wire=program.by_name["experts0"].dtype,
    )
    return replace(schedule, programs=(replace(program, setup=(*program.setup, one)),))


def recomputed(schedule: Schedule) -> Schedule:
    """Run experts again before their backward."""
    (program,) = schedule.programs
    by_id = {each.id: each for each in program.step}

    def change(operation: Operation) -> Iterable[Operation]:
        if operation.id.endswith("/2/backward"):
            forward = by_id[operation.id.replace("/backward", "/forward")]
            name = operation.id.replace("/backward", "/recompute")
            return changed(forward, id=name, action=Action.RECOMPUTE), operation
        return (operation,)

    return edited(schedule, change)


def summed_twice(what: str) -> Edit:
    """Sum gradients over expert ranks, then over their copies: in all over every rank."""

    def edit(schedule: Schedule) -> Schedule:
        def change(operation: Operation) -> Iterable[Operation]:
            if isinstance(operation, AllReduce) and f"/{what}" in operation.id:
                more = changed(operation, id=f"{operation.id}/more", group="edp")
                return changed(operation, group="ep"), more
            return (operation,)

        return edited(schedule, change)

    return edit


def before(name: str, other: str) -> Edit:
    """Issue an operation before another one, in both of their layers and micro-batches."""

    def edit(schedule: Schedule) -> Schedule:
        (program,) = schedule.programs
        for each in program.step:
            if each.id.endswith(f"/{name}"):
                place = each.id.removesuffix(name)
                schedule = moved(schedule, each.id, before=f"{place}{other}")
        return schedule

    return edit


def _edit(edit: Edit) -> Callable[[Plan], Edit]:
    return lambda _: edit


LOST = {"accumulate": False}
MAPS = ("layer1/map", "layer0/map")
WEIGHTS = ("experts1", "experts0")
FORWARD, BACKWARD = Action.FORWARD, Action.BACKWARD

Case = tuple[Plan, Callable[[Plan], Edit]]

EDITS: dict[str, Case] = {
    "expert gradients: 1/EP missing": (EP4, divided(lambda plan: 1 / plan.ranks)),
    "expert gradients: 1/EP twice": (EP4, divided(lambda plan: plan.ranks)),
    "expert gradients: divided by EDP again": (D22, divided(lambda plan: plan.data)),
    "expert gradients: over the dense group": (D22, _edit(reduced("experts", group="all"))),
    "expert gradients: over EP in place of EDP": (D22, _edit(reduced("experts", group="ep"))),
    "expert gradients: not over EDP": (D22, _edit(unreduced("experts"))),
    "expert gradients: not reduced where EDP is 1": (EP4, _edit(unreduced("experts"))),
    "expert gradients: average over EDP": (
        D22,
        _edit(reduced("experts", reduction=Reduction.AVERAGE)),
    ),
    "expert gradients: average of a mean over EP": (
        D22,
        lambda plan: (
            lambda schedule: divided(lambda own: 1 / own.data)(plan)(
                reduced("experts", reduction=Reduction.AVERAGE)(schedule)
            )
        ),
    ),
    "expert gradients: first micro-batch doubled": (EP4, _edit(again("mb1/experts0/add"))),
    "expert gradients: first micro-batch overwritten": (
        EP4,
        _edit(lambda schedule: every(schedule, ending("mb1/experts0/add"), **LOST)),
    ),
    "router gradient: over EP only": (D22, _edit(reduced("router", group="ep"))),
    "router gradient: over EDP only": (D22, _edit(reduced("router", group="edp"))),
    "router gradient: over EP, then EDP": (D22, _edit(summed_twice("router"))),
    "router gradient: average": (EP4, _edit(reduced("router", reduction=Reduction.AVERAGE))),
    "router gradient: not reduced": (EP4, _edit(unreduced("router"))),
    "router gradient: left out of the step below": (EP4, _edit(left_out("/sum1"))),
    "gradient of rows left out of the step below": (EP4, _edit(left_out("/sum0"))),
    "gradient of rows added twice": (EP4, _edit(again("layer0/sum0"))),
    "gradient of probabilities left out": (EP4, _edit(zeroed("probs_back"))),
    "adjoint of dispatch left out": (EP4, _edit(zeroed("dispatch_back"))),
    "adjoint of combine left out": (EP4, _edit(zeroed("combine_back"))),
    "dispatch left out": (EP4, _edit(left_out("/dispatch"))),
    "probabilities not dispatched": (EP4, _edit(left_out("/dispatch_probs"))),
    "combine left out": (EP4, _edit(left_out("/combine"))),
    "combine twice": (EP4, _edit(again("/combine"))),
    "rows sent back without experts": (EP4, _edit(sends("combine", "recv"))),
    "outputs sent back as gradients": (EP4, _edit(sends("dispatch_back", "out"))),
    "forward rows in place of slopes": (EP4, _edit(sends("combine_back", "back"))),
    "probabilities before rows": (EP4, _edit(before("dispatch_probs", "dispatch"))),
    "permute by indices of another layer": (EP4, _edit(reads("layer1/1", FORWARD, *MAPS))),
    "combine by indices of another layer": (EP4, _edit(reads("layer1/3", FORWARD, *MAPS))),
    "dy dispatched by indices of another layer": (EP4, _edit(reads("layer1/3", BACKWARD, *MAPS))),
    "dx combined by indices of another layer": (EP4, _edit(reads("layer1/1", BACKWARD, *MAPS))),
    "experts of another layer": (EP4, _edit(reads("layer1/2", FORWARD, *WEIGHTS))),
    "backward by experts of another layer": (EP4, _edit(reads("layer1/2", BACKWARD, *WEIGHTS))),
    "probabilities of another layer": (
        EP4,
        _edit(reads("layer1/2", FORWARD, "layer1/got", "layer0/got")),
    ),
    "backward by probabilities of another layer": (
        EP4,
        _edit(reads("layer1/2", BACKWARD, "layer1/got", "layer0/got")),
    ),
    "rows of another layer": (EP4, _edit(reads("layer1/2", FORWARD, "layer1/recv", "layer0/recv"))),
    "saved inputs of another layer": (
        EP4,
        _edit(reads("layer1/2", BACKWARD, "layer1/recv", "layer0/recv")),
    ),
    "outputs saved in place of inputs": (
        EP4,
        _edit(reads("layer1/2", BACKWARD, "layer1/recv", "layer1/out")),
    ),
    "slopes of another layer": (
        EP4,
        _edit(reads("layer0/2", BACKWARD, "layer0/dout", "layer1/dout")),
    ),
    "router reads the layer below": (EP4, _edit(reads("layer1/0", FORWARD, "h1", "h0"))),
    "rows of the layer below": (EP4, _edit(reads("layer1/1", FORWARD, "h1", "h0"))),
    "router of another layer": (EP4, _edit(reads("layer1/0", FORWARD, "router1", "router0"))),
    "router backward of another layer": (
        EP4,
        _edit(reads("layer1/0", BACKWARD, "router1", "router0")),
    ),
    "experts of the first rank on all ranks": (EP4, _edit(broadcast_in_setup)),
    "experts computed again": (EP4, _edit(recomputed)),
    "experts computed twice": (EP4, _edit(again("/2/forward"))),
    "loss counted twice": (
        EP4,
        _edit(lambda schedule: every(schedule, ending("loss/seed"), value=2.0)),
    ),
    "ZeRO-3: experts averaged over EP only": (WHOLE22, _edit(reduced("experts", group="ep"))),
    "ZeRO-3: experts not reduced": (WHOLE, _edit(unreduced("experts"))),
    "ZeRO-3: divided by EP again": (WHOLE, divided(lambda plan: plan.ranks)),
    "ZeRO-3: over EP, then EDP": (WHOLE22, _edit(summed_twice("experts"))),
    "ZeRO-3: experts of another layer": (WHOLE, _edit(reads("layer1/2", FORWARD, *WEIGHTS))),
    "ZeRO-3: adjoint of dispatch left out": (WHOLE, _edit(zeroed("dispatch_back"))),
}
