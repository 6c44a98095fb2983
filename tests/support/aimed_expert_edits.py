"""Wrong edits aimed at training with experts: written from descriptions of it, not of its proof.

The list was made before its author had read how values are proved; each is wrong training. Most
edit a schedule that has all parts at once, where a fault has the most places to hide.
"""

from collections.abc import Iterable
from dataclasses import replace

from expert_changes import (
    Edit,
    after,
    before,
    copied,
    doubled,
    dropped,
    fields,
    of_first_micro_batch,
    operand,
    put,
    summed,
    zero,
    zeroed,
)
from expert_edits_of_loads import (
    EXPERTS,
    Case,
    both,
    counted,
    dropped_otherwise_backward,
    load_from,
    moved_before,
    no_operand,
    of,
)
from experts_by_hand import WEIGHTS, Plan

from zsim.dtype import DType
from zsim.model.experts import DropRule, Drops, LoadScope
from zsim.schedule.operation import (
    AllToAll,
    Branch,
    Broadcast,
    Compute,
    Copy,
    Operation,
    Reduction,
    Role,
)
from zsim.schedule.replace import replace as changed
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD

DROPS = Drops(capacity=2)
FULL = Plan(
    data=2,
    drops=DROPS,
    auxiliary=LoadScope.MICRO_BATCH,
    bias=True,
    shared=True,
    recomputed=True,
    clipped=True,
)
TENSOR = Plan(
    tensor=2, auxiliary=LoadScope.SEQUENCE, bias=True, shared=True, clipped=True, layers=1
)
BATCH = Plan(auxiliary=LoadScope.BATCH, bias=True, micro_batches=3, layers=1)
HALF = Plan(half=True, bias=True, auxiliary=LoadScope.RANK, shared=True, layers=1)
STAGES = Plan(stages=2, bias=True, shared=True, clipped=True)
OWN = FULL.experts // FULL.ranks * WEIGHTS
"""Elements of the experts of a rank."""


def doubled_target(*ends: str) -> Edit:
    """Add what an exchange writes to itself."""

    def more(each: Operation) -> Operation:
        assert isinstance(each, AllToAll)
        return copied(each, each.target, each.target, accumulate=True)

    return after(*ends, more=more)


def shifted_experts(schedule: Schedule) -> Schedule:
    """Let the second expert of a rank begin with the weights of the first one."""
    view = of("experts0", WEIGHTS)
    return after(
        "experts0/initialize",
        more=lambda each: copied(each, view, changed(view, start=WEIGHTS)),
    )(schedule)


def broadcast(name: str, end: str, root: int) -> Edit:
    """Give the experts of one expert rank to the others."""
    view = of(name, OWN)
    return after(
        end,
        more=lambda each: Broadcast(
            id=f"{each.id}/broadcast",
            stream="compute",
            group="ep",
            source=view,
            target=view,
            root=root,
            wire=DType.FP32,
        ),
    )


def gradient_of_another(schedule: Schedule) -> Schedule:
    """Add the gradient of the first expert of a rank to that of the second one, too."""

    def more(each: Operation) -> Operation:
        assert isinstance(each, Copy)
        target = of("experts0/sum", WEIGHTS)
        return copied(
            each,
            of("layer0/experts/gradient", WEIGHTS),
            changed(target, start=WEIGHTS),
            accumulate=True,
            divisor=each.divisor,
        )

    return after("experts0/add", more=more)(schedule)


def divisor(name: str, factor: int, by: int = 1) -> Edit:
    """Divide a gradient by another number."""

    def own(each: Operation) -> int:
        assert isinstance(each, Copy)
        return each.divisor * factor // by

    return fields(f"{name}/add", divisor=own)


def balanced_unless_skipped(schedule: Schedule) -> Schedule:
    """Update the bias only in steps that do not overflow."""
    (program,) = schedule.programs
    update = program.by_id["step/bias0/update"]
    free = program.by_id["step/bias0/load/free"]
    step: list[Operation] = []
    for each in program.step:
        if each.id in (update.id, free.id):
            continue
        if isinstance(each, Branch):
            step += [changed(each, otherwise=(*each.otherwise, update)), free]
        else:
            step.append(each)
    return replace(schedule, programs=(replace(program, step=tuple(step)),))


def swapped(end: str, role: Role, one: str, other: str) -> Edit:
    """Exchange two operands of a computation."""

    def change(each: Operation) -> Iterable[Operation]:
        assert isinstance(each, Compute)
        names = {one: other, other: one}
        found = tuple(
            changed(own, view=changed(own.view, buffer=names[own.view.buffer]))
            if own.role is role and own.view.buffer in names
            else own
            for own in each.operands
        )
        assert found != each.operands
        return (changed(each, operands=found),)

    return lambda schedule: put(schedule, lambda name: name.endswith(end), change)


def over(
    end: str, buffer: str, size: int, group: str, *, reduction: Reduction = Reduction.SUM
) -> Edit:
    """Sum a buffer over one more group after an operation."""
    return after(
        end,
        more=lambda each: summed(
            each, of(buffer, size), group, wire=DType.FP32, reduction=reduction
        ),
    )


def filled(end: str, buffer: str, size: int, value: float = 0.0) -> Edit:
    """Write a constant into a buffer before an operation."""
    return before(end, more=lambda each: zero(each, of(buffer, size), value))


IN, OUT, OF_OUTPUT = Role.INPUT, Role.OUTPUT, Role.OUTPUT_GRADIENT
WEIGHT = Role.PARAMETER

ROUTERS: dict[str, Case] = {
    "router weights of layer 0 in layer 1": (
        FULL,
        both(
            operand("layer1/0/forward", WEIGHT, "router1", "router0"),
            operand("layer1/0/backward", WEIGHT, "router1", "router0"),
        ),
    ),
    "router reads the other micro-batch": (
        FULL,
        of_first_micro_batch("layer0/0/forward", IN, "h0"),
    ),
    "router reads the layer's input of the layer before": (
        FULL,
        operand("layer1/0/forward", IN, "h1", "h0"),
    ),
    "experts weigh by another layer": (
        FULL,
        operand("layer1/2/forward", IN, "layer1/got", "layer0/got"),
    ),
    "weights never applied": (FULL, zeroed("/dispatch_probs", value=1.0)),
    "weights doubled on arrival": (FULL, doubled_target("layer1/dispatch_probs")),
    "gradient of weights does not reach the router": (FULL, zeroed("layer0/probs_back")),
    "gradient of weights twice": (FULL, doubled_target("layer0/probs_back")),
    "choice without the bias": (FULL, no_operand("layer0/0/forward", "bias0")),
    "bias of another layer both ways": (
        FULL,
        both(
            operand("layer0/0/forward", WEIGHT, "bias0", "bias1"),
            operand("layer0/0/backward", WEIGHT, "bias0", "bias1"),
        ),
    ),
    "router's gradient from the layer above": (
        FULL,
        operand("layer0/0/backward", OF_OUTPUT, "layer0/dprobs", "layer1/dprobs"),
    ),
    "router is not clipped": (FULL, dropped("router1/clip")),
    "router summed over expert ranks twice": (FULL, over("router0/reduce", "router0/sum", 6, "ep")),
    "router copies of tensor ranks not summed": (TENSOR, fields("router0/reduce", group="dense")),
    "router averaged over tensor ranks": (
        TENSOR,
        both(
            over("router0/reduce", "router0/sum", 6, "sequence", reduction=Reduction.AVERAGE),
            fields("router0/reduce", group="dense"),
        ),
    ),
}

LOADS: dict[str, Case] = {
    "bias before the last micro-batch": (
        FULL,
        moved_before("step/bias0/update", "step/mb1/layer0/0/forward"),
    ),
    "bias from one micro-batch": (FULL, fields("mb1/bias1/count", accumulate=False)),
    "bias from one rank": (FULL, dropped("bias1/reduce")),
    "bias over expert ranks": (FULL, fields("bias0/reduce", group="ep")),
    "bias over copies of tensor ranks twice": (
        TENSOR,
        over("bias0/reduce", "bias0/load", EXPERTS, "sequence"),
    ),
    "bias left as it was": (FULL, dropped("bias1/update")),
    "bias from kept rows": (FULL, load_from("bias0/count", "layer{layer}/kept")),
    "bias counted again by the recomputation": (
        FULL,
        after(
            "mb1/layer1/1/recompute",
            more=lambda each: copied(
                each, of("layer1/chosen", EXPERTS), of("bias1/load", EXPERTS), accumulate=True
            ),
        ),
    ),
    "bias from loads that are summed already": (
        FULL,
        both(
            moved_before("step/mb1/bias0/count", "step/mb1/auxiliary0/0/forward"),
            fields("mb1/bias0/count", source=of("layer0/load", EXPERTS)),
        ),
    ),
    "bias by the rule of gradients": (FULL, fields("bias0/update", rule=SGD())),
    "bias skipped with the step": (HALF, balanced_unless_skipped),
    "bias of the last stage only": (STAGES, dropped("bias0/update")),
    "bias averaged over data ranks": (
        FULL,
        both(
            over("bias0/reduce", "bias0/load", EXPERTS, "edp", reduction=Reduction.AVERAGE),
            fields("bias0/reduce", group="ep"),
        ),
    ),
    "auxiliary loss missing in one layer": (
        FULL,
        filled("layer1/0/backward", "layer1/dscores", EXPERTS),
    ),
    "auxiliary loss without the loss scale": (HALF, fields("auxiliary0/seed", scalar=None)),
    "auxiliary loss with the loss scale twice": (HALF, fields("auxiliary0/seed", value=8.0)),
    "auxiliary loss of the rank for the sequence": (TENSOR, dropped("load/reduce")),
    "auxiliary loss of the batch for the micro-batch": (
        replace(FULL, layers=1),
        before(
            "mb1/auxiliary0/0/forward",
            more=lambda each: copied(
                each, of("layer0/load", EXPERTS), of("layer0/load", EXPERTS), accumulate=True
            ),
        ),
    ),
    "auxiliary loss with loads of another micro-batch": (
        FULL,
        of_first_micro_batch("auxiliary0/0/backward", IN, "layer0/load"),
    ),
    "auxiliary loss with loads of another layer": (FULL, load_from("layer1/load", "layer0/chosen")),
    "auxiliary loss divided by the data ranks": (FULL, fields("auxiliary1/seed", value=0.25)),
    "auxiliary loss times the expert ranks": (FULL, fields("auxiliary0/seed", value=2.0)),
    "auxiliary loss with kept rows": (FULL, load_from("layer1/load", "layer1/kept")),
    "auxiliary loss read before its sum": (
        FULL,
        moved_before("step/mb0/layer0/load/reduce", "step/mb0/layer0/1/forward"),
    ),
    "auxiliary gradient of the former micro-batch": (
        FULL,
        of_first_micro_batch("layer0/0/backward", OF_OUTPUT, "layer0/dscores"),
    ),
    "auxiliary loss forgets the first micro-batch": (
        BATCH,
        fields("mb1/layer0/so_far", accumulate=False),
    ),
    "auxiliary loss counts a micro-batch twice": (BATCH, doubled("mb2/layer0/so_far")),
    "auxiliary loss over expert ranks": (BATCH, fields("load/reduce", group="edp")),
}

ROWS: dict[str, Case] = {
    "rows by the map of another micro-batch": (
        FULL,
        of_first_micro_batch("layer0/1/forward", IN, "layer0/map"),
    ),
    "rows by the map of another layer": (
        FULL,
        operand("layer1/1/forward", IN, "layer1/map", "layer0/map"),
    ),
    "gradients of sums by the map of another micro-batch": (
        FULL,
        of_first_micro_batch("layer0/3/backward", IN, "layer0/map"),
    ),
    "gradients of rows by the map of another layer": (
        FULL,
        operand("layer1/1/backward", IN, "layer1/map", "layer0/map"),
    ),
    "gradients of rows do not come back": (FULL, zeroed("layer0/dispatch_back")),
    "gradients of rows twice": (FULL, doubled_target("layer1/dispatch_back")),
    "capacity of the next smaller number": (FULL, counted(drops=Drops(capacity=1))),
    "no capacity": (FULL, counted(drops=None)),
    "rows dropped forward, others dropped backward": (
        replace(FULL, recomputed=False),
        dropped_otherwise_backward(replace(DROPS, by=DropRule.POSITION)),
    ),
    "last rows dropped, not the lightest": (
        FULL,
        counted(drops=replace(DROPS, by=DropRule.POSITION)),
    ),
    "splits by counts of another layer": (FULL, fields("layer1/read", layer=0)),
    "splits by rows chosen": (
        FULL,
        fields("/counts", source=lambda each: of(f"{each.id.split('/')[2]}/chosen", EXPERTS)),
    ),
    "sum reads rows before they are back": (
        FULL,
        moved_before("step/mb0/layer0/combine", "step/mb0/loss/0/forward"),
    ),
    "a micro-batch is read twice": (FULL, fields("mb1/load", micro_batch=0)),
}

WEIGHTS_OF_EXPERTS: dict[str, Case] = {
    "an expert begins with its neighbour's weights": (FULL, shifted_experts),
    "experts of the last rank on all ranks": (
        FULL,
        broadcast("experts1", "experts1/initialize", 1),
    ),
    "experts of the first rank on all ranks after the step": (
        FULL,
        broadcast("experts0", "experts0/update", 0),
    ),
    "gradient of an expert added to another": (FULL, gradient_of_another),
    "gradients of the last micro-batch only": (FULL, fields("mb1/experts1/add", accumulate=False)),
    "gradients of the step before": (FULL, fields("mb0/experts0/add", accumulate=True)),
    "weights of rows of another micro-batch in backward": (
        FULL,
        of_first_micro_batch("layer0/2/backward", IN, "layer0/got"),
    ),
    "recomputed rows of another layer": (
        FULL,
        operand("layer1/2/backward", IN, "layer1/again/recv", "layer0/recv"),
    ),
    "experts over the dense group": (FULL, fields("experts0/reduce", group="all")),
    "experts not over their copies": (FULL, dropped("experts1/reduce")),
    "experts divided by expert ranks again": (FULL, divisor("experts0", FULL.ranks)),
    "experts divided by their copies only": (FULL, divisor("experts0", 1, FULL.ranks)),
    "experts reduced before the last backward": (
        FULL,
        moved_before("step/experts0/reduce", "step/mb1/experts0/add"),
    ),
    "experts updated twice": (FULL, doubled("experts1/update")),
    "experts never updated": (FULL, dropped("experts1/update")),
    "experts at another rate": (
        FULL,
        fields("experts0/update", rule=SGD(learning_rate=0.02)),
    ),
    "shared expert twice": (
        FULL,
        after(
            "shared1/0/forward",
            more=lambda each: copied(
                each, of("layer1/shared", 6), of("layer1/shared", 6), accumulate=True
            ),
        ),
    ),
    "shared expert left out": (FULL, filled("layer0/3/forward", "layer0/shared", 6)),
    "shared expert's gradient left out": (FULL, dropped("layer1/sum2")),
    "shared expert summed over tensor ranks twice": (
        TENSOR,
        over("common0/reduce", "common0/sum", 6, "sequence"),
    ),
    "shared expert in the group of experts": (FULL, fields("common1/reduce", group="edp")),
}

STEPS: dict[str, Case] = {
    "norm counts experts of each copy": (FULL, fields("norm/experts/reduce", group="all")),
    "norm of own experts": (FULL, dropped("norm/experts/reduce")),
    "norm before the sum over copies": (
        FULL,
        moved_before("step/experts0/reduce", "step/experts0/clip"),
    ),
    "norm of the last stage": (STAGES, dropped("norm/dense/reduce")),
    "norm of experts of the own stage": (STAGES, fields("norm/experts/reduce", group="ep")),
    "norm counts copies of tensor ranks": (TENSOR, fields("norm/experts/reduce", group="all")),
    "clipping of dense parameters only": (FULL, dropped("experts0/clip", "experts1/clip")),
    "overflow of dense gradients only": (HALF, no_operand("overflow/measure", "experts0/sum")),
    "overflow of own experts only": (
        replace(HALF, data=2, clipped=True),
        fields("overflow/reduce", group="edp"),
    ),
    "shared expert keeps the loss scale": (HALF, dropped("common0/unscale")),
    "stage gets the hidden states before its layer": (
        STAGES,
        fields("h1/send", source=of("h0", 6)),
    ),
    "stage gets the gradient of shared experts only": (
        STAGES,
        fields("layer1/below0/send", source=of("layer1/below3", 6)),
    ),
    "stage gets gradients of the rows only": (
        STAGES,
        fields("layer1/below0/send", source=of("layer1/below1", 6)),
    ),
    "gradients of routing and rows exchanged": (
        FULL,
        swapped("layer0/3/backward", Role.INPUT_GRADIENT, "layer0/below0", "layer0/dshared"),
    ),
    "loss without gradient": (FULL, fields("loss/seed", value=0.0)),
}

EDITS: dict[str, Case] = ROUTERS | LOADS | ROWS | WEIGHTS_OF_EXPERTS | STEPS
