"""Edits of capacities, auxiliary losses, biases, shared experts, norms, overflow and stages.

Names with "harmless" are right; the oracle on real rows says so, too.
"""

from dataclasses import replace
from typing import Any

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
    summed,
    whole,
    zero,
    zeroed,
)
from experts_by_hand import Plan
from faults.schedules import everywhere

from zsim.dtype import DType
from zsim.model.experts import DropRule, Drops, LoadScope
from zsim.schedule.operation import AllToAll, Compute, Operation, Reduction, Role, View
from zsim.schedule.replace import replace as changed
from zsim.schedule.schedule import Program, Schedule

EXPERTS = Plan().experts
CAPACITY = Plan(drops=Drops(capacity=2))
KEPT = Plan(drops=Drops(capacity=2), auxiliary=LoadScope.RANK, bias=True)
RANK = Plan(auxiliary=LoadScope.RANK)
SEQUENCE = Plan(auxiliary=LoadScope.SEQUENCE, tensor=2, layers=1)
TOKENS = Plan(auxiliary=LoadScope.MICRO_BATCH, layers=1, data=2)
BATCH = Plan(auxiliary=LoadScope.BATCH, layers=1)
BIAS = Plan(bias=True, data=2, layers=1)
COPIES = Plan(bias=True, tensor=2, layers=1)
LAYERS = Plan(bias=True)
SHARED = Plan(shared=True)
NORM = Plan(clipped=True, data=2, layers=1)
HALF = Plan(half=True, clipped=True, bias=True, auxiliary=LoadScope.RANK, layers=1)
AGAIN = Plan(recomputed=True)
STAGES = Plan(stages=2)
STAGED = Plan(stages=2, clipped=True, half=True, micro_batches=1)
TENSOR = Plan(tensor=2, layers=1, shared=True)


def counted(**values: Any) -> Edit:  # noqa: ANN401  # any field
    """Change the count of rows."""
    return lambda schedule: replace(
        schedule, counts=tuple(replace(each, **values) for each in schedule.counts)
    )


def dropped_otherwise_backward(rule: Drops) -> Edit:
    """Let the buffers of backward hold the rows that another rule keeps."""

    def edit(schedule: Schedule) -> Schedule:
        (count,) = schedule.counts
        other = replace(count, name="other", drops=rule)

        def change(program: Program) -> Program:
            buffers = tuple(
                changed(each, rows=changed(each.rows, count="other"))
                if each.rows is not None and "/d" in each.name and "dispatch" not in each.name
                else each
                for each in program.buffers
            )
            return replace(program, buffers=buffers)

        programs = tuple(map(change, schedule.programs))
        return replace(schedule, programs=programs, counts=(count, other))

    return edit


def of(buffer: str, elements: int) -> View:
    """Return the view of a buffer."""
    return View(buffer=buffer, size=elements)


def load_from(name: str, source: str) -> Edit:
    """Let loads be copied from another buffer of the layer."""

    def view(operation: Operation) -> View:
        layer = (
            operation.id.partition("layer")[2].partition("/")[0]
            or operation.id.rpartition("/")[0][-1]
        )
        return of(source.format(layer=layer), EXPERTS)

    return fields(name, source=view)


def load_again(group: str) -> Edit:
    """Sum loads of an auxiliary loss over one more group."""
    return after(
        "layer0/load",
        more=lambda each: summed(each, of("layer0/load", EXPERTS), group, wire=DType.INT64),
    )


def whole_of(schedule: Schedule, buffer: str) -> View:
    """Return the view of a whole buffer of the first program that has it."""
    return next(
        whole(program, buffer) for program in schedule.programs if buffer in program.by_name
    )


def biased_each_micro_batch(schedule: Schedule) -> Schedule:
    """Update the bias after each micro-batch, from that micro-batch alone."""
    (program,) = schedule.programs
    reduce, update = (program.by_id[f"step/bias0/{name}"] for name in ("reduce", "update"))
    step: list[Operation] = []
    for each in program.step:
        if each.id in (reduce.id, update.id):
            continue
        step.append(changed(each, accumulate=False) if each.id == "step/mb1/bias0/count" else each)
        if each.id.endswith("embed/add"):
            batch = each.id.split("/")[1]
            step += [changed(own, id=f"{own.id}/{batch}") for own in (reduce, update)]
    return replace(schedule, programs=(replace(program, step=tuple(step)),))


def moved_before(name: str, other: str) -> Edit:
    """Issue an operation before another one."""

    def edit(schedule: Schedule) -> Schedule:
        def change(program: Program) -> Program:
            if not {name, other} <= program.by_id.keys():
                return program
            operation = program.by_id[name]
            step = [
                made
                for each in program.step
                if each.id != name
                for made in ((operation, each) if each.id == other else (each,))
            ]
            return replace(program, step=tuple(step))

        return everywhere(schedule, change)

    return edit


def unscaled(schedule: Schedule) -> Schedule:
    """Leave the loss scale out of the gradient of the auxiliary loss."""
    return fields("auxiliary0/seed", scalar=None)(schedule)


def no_operand(end: str, name: str) -> Edit:
    """Leave an operand out of a computation."""

    def operands(compute: Compute) -> tuple[object, ...]:
        found = tuple(each for each in compute.operands if each.view.buffer != name)
        assert found != compute.operands
        return found

    return fields(end, operands=operands)


def both(*edits: Edit) -> Edit:
    """Make several edits."""

    def edit(schedule: Schedule) -> Schedule:
        for each in edits:
            schedule = each(schedule)
        return schedule

    return edit


def _halves(each: Operation) -> Operation:
    return copied(each, of("layer0/load", EXPERTS), of("layer0/load", EXPERTS), divisor=2)


def _doubled_target(each: Operation) -> Operation:
    assert isinstance(each, AllToAll)
    return copied(each, each.target, each.target, accumulate=True)


Case = tuple[Plan, Edit]
POSITION, LESS = Drops(capacity=2, by=DropRule.POSITION), Drops(capacity=1)

OF_CAPACITY: dict[str, Case] = {
    "capacity: by position, not weight": (CAPACITY, counted(drops=POSITION)),
    "capacity: of one less": (CAPACITY, counted(drops=LESS)),
    "capacity: of one more": (CAPACITY, counted(drops=Drops(capacity=3))),
    "capacity: no drop": (CAPACITY, counted(drops=None)),
    "capacity: drop where there is none": (Plan(), counted(drops=LESS)),
    "capacity: other drop in backward": (CAPACITY, dropped_otherwise_backward(POSITION)),
    "capacity: no drop in backward": (CAPACITY, dropped_otherwise_backward(LESS)),
    "auxiliary loss counts kept rows": (KEPT, load_from("layer0/load", "layer{layer}/kept")),
    "bias counts kept rows": (KEPT, load_from("/count", "layer{layer}/kept")),
    "counts of chosen rows are sent": (
        CAPACITY,
        fields("/counts", source=lambda each: of(f"{each.id.split('/')[2]}/chosen", EXPERTS)),
    ),
}

OF_LOSSES: dict[str, Case] = {
    "auxiliary loss: times EP": (RANK, fields("auxiliary0/seed", value=2.0)),
    "auxiliary loss: divided by DP twice": (TOKENS, fields("auxiliary0/seed", value=0.5)),
    "auxiliary loss: without the loss scale": (HALF, unscaled),
    "auxiliary loss: left out": (
        RANK,
        both(
            dropped("auxiliary0/0/backward", "auxiliary1/0/backward"),
            before(
                "layer0/0/backward",
                "layer1/0/backward",
                more=lambda each: zero(each, of(f"{each.id.split('/')[2]}/dscores", EXPERTS)),
            ),
        ),
    ),
    "auxiliary loss: of another layer": (
        RANK,
        operand("layer0/0/backward", Role.OUTPUT_GRADIENT, "layer0/dscores", "layer1/dscores"),
    ),
    "auxiliary loss: loads of another layer": (
        RANK,
        load_from("layer1/load", "layer0/chosen"),
    ),
    "auxiliary loss: scores of another layer": (
        RANK,
        operand("auxiliary1/0/backward", Role.INPUT, "layer1/scores", "layer0/scores"),
    ),
    "auxiliary loss: loads of another micro-batch": (
        RANK,
        of_first_micro_batch("auxiliary0/0/backward", Role.INPUT, "layer0/load"),
    ),
    "auxiliary loss: backward with other loads than forward": (
        RANK,
        operand("auxiliary1/0/backward", Role.INPUT, "layer1/load", "layer0/load"),
    ),
    "auxiliary loss: of the rank, not the micro-batch": (TOKENS, dropped("load/reduce")),
    "auxiliary loss: of expert ranks, not the micro-batch": (
        TOKENS,
        fields("load/reduce", group="ep"),
    ),
    "auxiliary loss: of the rank, not the sequence": (SEQUENCE, dropped("load/reduce")),
    "auxiliary loss: of all ranks, not the sequence": (
        SEQUENCE,
        fields("load/reduce", group="all"),
    ),
    "auxiliary loss: of the micro-batch, not the rank": (RANK, load_again("all")),
    "auxiliary loss: not over tensor ranks": (
        replace(TOKENS, data=1, tensor=2),
        fields("load/reduce", group="dense"),
    ),
    "auxiliary loss: over tensor ranks twice": (SEQUENCE, load_again("sequence")),
    "auxiliary loss: mean, not sum": (
        SEQUENCE,
        fields("load/reduce", reduction=Reduction.AVERAGE),
    ),
    "auxiliary loss: of the micro-batch, not the batch": (
        BATCH,
        fields("layer0/so_far", accumulate=False),
    ),
    "auxiliary loss: of the batch without this micro-batch": (
        BATCH,
        moved_before("step/mb1/layer0/so_far", "step/mb1/layer0/1/forward"),
    ),
    "auxiliary loss: micro-batch counted twice": (BATCH, doubled("mb1/layer0/so_far")),
    "auxiliary loss: loads halved": (RANK, after("layer0/load", more=_halves)),
}

OF_BIASES: dict[str, Case] = {
    "bias: own counts": (BIAS, dropped("bias0/reduce")),
    "bias: over expert ranks only": (BIAS, fields("bias0/reduce", group="ep")),
    "bias: over data ranks only": (BIAS, fields("bias0/reduce", group="edp")),
    "bias: average of counts": (BIAS, fields("bias0/reduce", reduction=Reduction.AVERAGE)),
    "bias: copies of tensor ranks left out": (COPIES, fields("bias0/reduce", group="dense")),
    "bias: copies of tensor ranks counted twice": (
        COPIES,
        after(
            "bias0/reduce",
            more=lambda each: summed(each, of("bias0/load", EXPERTS), "sequence", wire=DType.FP32),
        ),
    ),
    "bias: each micro-batch": (BIAS, biased_each_micro_batch),
    "bias: last micro-batch only": (BIAS, fields("mb1/bias0/count", accumulate=False)),
    "bias: counts again": (BIAS, doubled("mb1/bias0/count")),
    "bias: not updated": (BIAS, dropped("bias0/update")),
    "bias: updated twice": (BIAS, doubled("bias0/update")),
    "bias: other rate": (
        BIAS,
        fields("bias0/update", rule=lambda each: replace(each.rule, learning_rate=2e-3)),
    ),
    "bias: counts of another layer": (LAYERS, load_from("bias1/count", "layer0/chosen")),
    "bias: of another layer": (
        LAYERS,
        operand("layer1/0/forward", Role.PARAMETER, "bias1", "bias0"),
    ),
    "bias: of another layer in backward": (
        LAYERS,
        operand("layer1/0/backward", Role.PARAMETER, "bias1", "bias0"),
    ),
    "bias: divided as gradients are": (BIAS, fields("mb0/bias0/count", divisor=2)),
    "bias: updated before the last micro-batch": (
        BIAS,
        moved_before("step/bias0/update", "step/mb1/layer0/0/forward"),
    ),
    "bias: broadcast of the first rank's counts": (
        BIAS,
        fields("bias0/reduce", reduction=Reduction.MAX),
    ),
    "bias: after gradients, harmless": (
        BIAS,
        moved_before("step/embed/reduce", "step/bias0/reduce"),
    ),
    "bias: over EP, then EDP, harmless": (
        BIAS,
        both(
            after(
                "bias0/reduce",
                more=lambda each: summed(each, of("bias0/load", EXPERTS), "edp", wire=DType.FP32),
            ),
            fields("bias0/reduce", group="ep"),
        ),
    ),
}

OF_SHARED: dict[str, Case] = {
    "shared expert: twice": (
        SHARED,
        after(
            "shared0/0/forward",
            more=lambda each: copied(
                each, of("layer0/shared", 6), of("layer0/shared", 6), accumulate=True
            ),
        ),
    ),
    "shared expert: of another layer": (
        SHARED,
        operand("layer1/3/forward", Role.INPUT, "layer1/shared", "layer0/shared"),
    ),
    "shared expert: weights of another layer": (
        SHARED,
        operand("shared1/0/forward", Role.PARAMETER, "common1", "common0"),
    ),
    "shared expert: weights of another layer in backward": (
        SHARED,
        operand("shared1/0/backward", Role.PARAMETER, "common1", "common0"),
    ),
    "shared expert: gradient left out": (SHARED, dropped("layer0/sum2")),
    "shared expert: gradient twice": (SHARED, doubled("layer0/sum2")),
    "shared expert: gradient of the layer's output": (
        SHARED,
        operand("shared0/0/backward", Role.OUTPUT_GRADIENT, "layer0/dshared", "layer1/dshared"),
    ),
    "shared expert: read after the layer": (
        SHARED,
        operand("shared1/0/forward", Role.INPUT, "h1", "h0"),
    ),
    "shared expert: over EP only": (
        replace(SHARED, data=2, layers=1),
        fields("common0/reduce", group="ep"),
    ),
    "shared expert: over EDP as experts are": (
        replace(SHARED, data=2, layers=1),
        fields("common0/reduce", group="edp"),
    ),
    "shared expert: not over tensor ranks": (TENSOR, fields("common0/reduce", group="dense")),
    "shared expert: left out": (
        SHARED,
        after("shared0/0/forward", more=lambda each: zero(each, of("layer0/shared", 6))),
    ),
}

OF_TENSOR: dict[str, Case] = {
    "router gradient: not over tensor ranks": (TENSOR, fields("router0/reduce", group="dense")),
    "router gradient: over tensor ranks only": (
        TENSOR,
        fields("router0/reduce", group="sequence"),
    ),
    "router gradient: over tensor ranks twice": (
        TENSOR,
        after(
            "router0/reduce",
            more=lambda each: summed(each, of("router0/sum", 6), "sequence", wire=DType.FP32),
        ),
    ),
    "router gradient: average over tensor ranks": (
        TENSOR,
        both(
            after(
                "router0/reduce",
                more=lambda each: summed(
                    each,
                    of("router0/sum", 6),
                    "sequence",
                    wire=DType.FP32,
                    reduction=Reduction.AVERAGE,
                ),
            ),
            fields("router0/reduce", group="dense"),
        ),
    ),
    "gradient below experts: not over tensor ranks": (
        TENSOR,
        fields("embed/reduce", group="dense"),
    ),
    "expert gradients: not over tensor ranks": (
        replace(TENSOR, data=2),
        fields("experts0/reduce", group="sequence"),
    ),
    "router gradient: over tensor ranks last, harmless": (
        TENSOR,
        both(
            after(
                "router0/reduce",
                more=lambda each: summed(each, of("router0/sum", 6), "sequence", wire=DType.FP32),
            ),
            fields("router0/reduce", group="dense"),
        ),
    ),
}

OF_NORMS: dict[str, Case] = {
    "norm: experts once per copy": (NORM, fields("norm/experts/reduce", group="all")),
    "norm: experts twice": (NORM, doubled("norm/sum")),
    "norm: own experts only": (NORM, dropped("norm/experts/reduce")),
    "norm: without experts": (NORM, dropped("norm/sum")),
    "norm: over EDP in place of EP": (NORM, fields("norm/experts/reduce", group="edp")),
    "norm: average over EP": (
        NORM,
        fields("norm/experts/reduce", reduction=Reduction.AVERAGE),
    ),
    "norm: experts only": (
        NORM,
        operand("experts0/clip", Role.INPUT, "norm/dense", "norm/experts"),
    ),
    "norm: dense over EP, too": (
        NORM,
        after(
            "norm/dense/measure",
            more=lambda each: summed(each, of("norm/dense", 1), "ep", wire=DType.FP32),
        ),
    ),
    "norm: before experts are reduced": (
        NORM,
        moved_before("step/experts0/reduce", "step/experts0/clip"),
    ),
    "norm: without the router": (NORM, no_operand("norm/dense/measure", "router0/sum")),
    "norm: experts are not clipped": (NORM, dropped("experts0/clip")),
    "norm: clipped twice": (NORM, doubled("router0/clip")),
    "norm: of the stage only": (
        replace(STAGES, clipped=True),
        dropped("norm/dense/reduce"),
    ),
    "norm: measured twice, harmless": (NORM, doubled("norm/experts/measure")),
}

OF_STEPS: dict[str, Case] = {
    "overflow: experts are not looked at": (HALF, no_operand("overflow/measure", "experts0/sum")),
    "overflow: the router is not looked at": (
        HALF,
        no_operand("overflow/measure", "router0/sum"),
    ),
    "overflow: not reduced": (HALF, fields("overflow/reduce", group="edp")),
    "overflow: over data ranks only": (
        replace(HALF, data=2),
        fields("overflow/reduce", group="edp"),
    ),
    "overflow: of the own stage": (STAGED, fields("overflow/reduce", group="all")),
    "unscaled: experts are not": (HALF, dropped("experts0/unscale")),
    "unscaled: experts twice": (HALF, doubled("experts0/unscale")),
    "recompute: rows not exchanged again": (AGAIN, dropped("/dispatch_again")),
    "recompute: by the map of another layer": (
        AGAIN,
        operand("layer1/1/recompute", Role.INPUT, "layer1/map", "layer0/map"),
    ),
    "recompute: from another micro-batch": (
        AGAIN,
        of_first_micro_batch("layer0/1/recompute", Role.INPUT, "h0"),
    ),
    "recompute: by the map of another micro-batch": (
        AGAIN,
        of_first_micro_batch("layer0/1/recompute", Role.INPUT, "layer0/map"),
    ),
    "recompute: rows of another layer": (
        AGAIN,
        operand("layer1/2/backward", Role.INPUT, "layer1/again/recv", "layer0/recv"),
    ),
    "recompute: weights of another layer": (
        AGAIN,
        operand("layer1/2/backward", Role.PARAMETER, "experts1", "experts0"),
    ),
    "recompute: twice, harmless": (AGAIN, doubled("/2/recompute")),
    "saved inputs of another micro-batch": (
        Plan(),
        of_first_micro_batch("layer0/2/backward", Role.INPUT, "layer0/recv"),
    ),
    "probabilities of another micro-batch": (
        Plan(),
        of_first_micro_batch("layer0/2/forward", Role.INPUT, "layer0/got"),
    ),
    "combine by indices of another micro-batch": (
        Plan(),
        of_first_micro_batch("layer0/3/forward", Role.INPUT, "layer0/map"),
    ),
    "permute by indices of another micro-batch": (
        Plan(),
        of_first_micro_batch("layer1/1/forward", Role.INPUT, "layer1/map"),
    ),
    "dy by indices of another micro-batch": (
        Plan(),
        of_first_micro_batch("layer1/3/backward", Role.INPUT, "layer1/map"),
    ),
    "dx by indices of another micro-batch": (
        Plan(),
        of_first_micro_batch("layer1/1/backward", Role.INPUT, "layer1/map"),
    ),
    "router's backward of another micro-batch": (
        Plan(),
        of_first_micro_batch("layer1/0/backward", Role.INPUT, "h1"),
    ),
    "weights of all rows one": (Plan(), zeroed("/dispatch_probs", value=1.0)),
    "weights of rows doubled": (
        Plan(),
        after(
            "/dispatch_probs",
            more=_doubled_target,
        ),
    ),
    "counts of another micro-batch": (
        Plan(layers=1),
        fields("mb1/layer0/read", micro_batch=0),
    ),
    "counts of the own rank": (
        Plan(),
        fields("/to_host", source=lambda each: of(f"{each.id.split('/')[2]}/chosen", EXPERTS)),
    ),
    "stage: hidden states of another layer": (
        replace(STAGES, layers=4),
        fields("h2/send", source=of("h1", 6)),
    ),
    "stage: gradients of the stage's output": (
        STAGES,
        fields("layer1/below0/send", source=of("slope", 6)),
    ),
    "stage: experts over stages": (STAGES, fields("experts1/reduce", group="stages")),
}

EDITS: dict[str, Case] = (
    OF_CAPACITY | OF_LOSSES | OF_BIASES | OF_SHARED | OF_TENSOR | OF_NORMS | OF_STEPS
)
