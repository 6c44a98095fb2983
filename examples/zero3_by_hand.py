"""ZeRO stage 3 of a three-layer model, written by hand: every operation stands here once.

    python examples/zero3_by_hand.py

Each layer has 6 parameters that are cut in shards over 4 ranks, with 2 elements of padding. A layer
is gathered, used and freed, forward and backward; its gradient is reduced to shards; SGD updates
the shards.
"""

from zsim.builder import COMMUNICATION, Named, ScheduleBuilder
from zsim.dtype import DType
from zsim.layout import Layout, Piece
from zsim.operation import Action, Role
from zsim.rule import SGD
from zsim.schedule import Contract, Kind, LogicalParameter, Schedule

RANKS, ELEMENTS, PADDED, WIDTH = 4, 6, 8, 5
SHARD = PADDED // RANKS
LAYERS = ("layer0", "layer1", "loss")


def write() -> Schedule:
    """The schedule of setup and one step."""
    build = ScheduleBuilder.of("zero3 by hand", data=RANKS)
    data = build.group("data", "data")
    setup, step = build.setup, build.step
    batch = build.buffer("batch", WIDTH, dtype=DType.INT64, produced=True)
    seed = build.buffer("seed", 1)
    flow, slope = {"batch": batch}, {"loss": seed}
    weight: dict[str, Named] = {}
    shard: dict[str, Named] = {}
    own: dict[str, Named] = {}
    for name in LAYERS:
        pieces = (Piece(parameter=f"{name}.weight", start=0, size=ELEMENTS),)
        build.layout(Layout(name=name, pieces=pieces, elements=PADDED, axis="data"))
        shard[name] = build.buffer(
            f"{name}/shard", SHARD, kind=Kind.PARAMETER, layout=name, shard="data", persistent=True
        )
        own[name] = build.buffer(
            f"{name}/own", SHARD, kind=Kind.GRADIENT, home=COMMUNICATION, layout=name, shard="data"
        )
        weight[name] = build.buffer(
            f"{name}/weight", PADDED, kind=Kind.COMMUNICATION, home=COMMUNICATION, layout=name
        )
        flow[name] = build.buffer(f"{name}/output", 1 if name == "loss" else WIDTH, produced=True)
        slope.setdefault(name, build.buffer(f"{name}/slope", WIDTH, produced=True))
        setup.allocate(shard[name])
        setup.compute(f"{name}/initialize", Action.INITIALIZE, [(Role.PARAMETER, shard[name].all)])

    inputs = dict(zip(LAYERS, ("batch", *LAYERS), strict=False))
    step.allocate(batch)
    step.compute("load", Action.LOAD, [(Role.OUTPUT, batch.all)])
    saved: dict[str, Named] = {}
    for name in LAYERS:
        saved[name] = build.buffer(f"{name}/saved", WIDTH, kind=Kind.SAVED, produced=True)
        step.allocate(weight[name])
        gathered = step.all_gather(f"{name}/gather", data, shard[name].all, weight[name].all)
        step.allocate(flow[name], saved[name])
        operands = [
            (Role.INPUT, flow[inputs[name]].all),
            (Role.PARAMETER, weight[name][:ELEMENTS]),
            (Role.OUTPUT, flow[name].all),
            (Role.SAVED, saved[name].all),
        ]
        done = step.compute(
            f"{name}/forward", Action.FORWARD, operands, unit=name, after=[gathered]
        )
        step.free(weight[name], uses=[done])
    step.free(flow["loss"])
    step.allocate(seed)
    step.fill("seed", seed.all, 1.0)
    for name in reversed(LAYERS):
        again = step.path(f"{name}/gather_again")
        gradient = build.buffer(f"{name}/gradient", ELEMENTS, produced=True)
        staging = build.buffer(f"{name}/staging", PADDED, kind=Kind.COMMUNICATION)
        step.allocate(weight[name])
        step.all_gather(f"{name}/gather_again", data, shard[name].all, weight[name].all)
        operands = [
            (Role.INPUT, flow[inputs[name]].all),
            (Role.SAVED, saved[name].all),
            (Role.PARAMETER, weight[name][:ELEMENTS]),
            (Role.OUTPUT_GRADIENT, slope[name].all),
            (Role.GRADIENT, gradient.all),
        ]
        if name != LAYERS[0]:
            step.allocate(slope[inputs[name]])
            operands.append((Role.INPUT_GRADIENT, slope[inputs[name]].all))
        step.allocate(gradient)
        done = step.compute(f"{name}/backward", Action.BACKWARD, operands, unit=name, after=[again])
        step.free(weight[name], uses=[done])
        step.free(flow[inputs[name]], saved[name], slope[name])
        step.allocate(staging)
        step.copy(f"{name}/stage", gradient.all, staging[:ELEMENTS], divisor=RANKS)
        padded = step.fill(f"{name}/pad", staging[ELEMENTS:], 0.0)
        step.free(gradient)
        step.allocate(own[name])
        reduced = step.reduce_scatter(
            f"{name}/reduce", data, staging.all, own[name].all, after=[padded]
        )
        step.free(staging, uses=[reduced])
    for name in LAYERS:
        operands = [(Role.PARAMETER, shard[name].all), (Role.GRADIENT, own[name].all)]
        reduced = step.path(f"{name}/reduce")
        updated = step.compute(
            f"{name}/update", Action.UPDATE, operands, rule=SGD(), after=[reduced]
        )
        step.free(own[name], uses=[updated])
    parameters = tuple(
        LogicalParameter(name=f"{name}.weight", elements=ELEMENTS) for name in LAYERS
    )
    return build.schedule(Contract(parameters=parameters, loss_divisor=RANKS))


if __name__ == "__main__":
    schedule = write()
    (program,) = schedule.programs
    print(f"{schedule.name}: {len(program.step)} operations for each of {schedule.mesh.size} ranks")
