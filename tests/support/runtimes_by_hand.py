"""Steps as other runtimes take them, written by hand: two parameters, one unit, few ranks."""

from itertools import pairwise

from zsim.dtype import DType
from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Axis, Joined, Mesh
from zsim.schedule.operation import Action, Role, View
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Schedule
from zsim.strategy.optimizer_rule import SGD

SIZES = {"w": 5, "b": 3}
"""Elements of the parameters."""


def pieces(**starts: int) -> tuple[Piece, ...]:
    """Where parameters lie."""
    return tuple(
        Piece(parameter=name, start=start, size=SIZES[name]) for name, start in starts.items()
    )


def contract(loss_divisor: int, *data_axes: str) -> Contract:
    """What all of them promise."""
    return Contract(
        parameters=tuple(LogicalParameter(name=name, elements=SIZES[name]) for name in SIZES),
        loss_divisor=loss_divisor,
        data_axes=data_axes,
    )


class Runtime:
    """A schedule in the making, with what all of them do."""

    def __init__(self, name: str, mesh: Mesh, *layouts: Layout) -> None:
        self.build = ScheduleBuilder(name, mesh)
        self.setup, self.step = self.build.setup, self.build.step
        for layout in layouts:
            self.build.layout(layout)
        self.x = self.build.buffer("x", 2, produced=True)
        self.y = self.build.buffer("y", 1, produced=True)
        self.saved = self.build.buffer("saved", 2, kind=Kind.SAVED, produced=True)
        self.seed = self.build.buffer("seed", 1)

    def state(
        self, name: str, elements: int, kind: Kind, layout: str, shard: str | None
    ) -> BufferHandle:
        """A model state in fp32, initialized."""
        made = self.build.buffer(
            name, elements, kind=kind, layout=layout, shard=shard, persistent=True
        )
        self.setup.allocate(made)
        role = Role.MASTER if kind is Kind.MASTER else Role.PARAMETER
        self.setup.compute(f"{name}/initialize", Action.INITIALIZE, [(role, made.all)])
        return made

    def narrow(
        self, name: str, elements: int, layout: str, shard: str | None = None
    ) -> BufferHandle:
        """Parameters or gradients in bf16, for a while; allocated."""
        made = self.build.buffer(name, elements, dtype=DType.BF16, layout=layout, shard=shard)
        self.step.allocate(made)
        return made

    def forward(self, w: View, b: View) -> str:
        """Load and run forward."""
        self.step.allocate(self.x)
        self.step.compute("load", Action.LOAD, [(Role.OUTPUT, self.x.all)])
        self.step.allocate(self.y, self.saved)
        return self.step.compute(
            "forward",
            Action.FORWARD,
            [
                (Role.INPUT, self.x.all),
                (Role.PARAMETER, w),
                (Role.PARAMETER, b),
                (Role.OUTPUT, self.y.all),
                (Role.SAVED, self.saved.all),
            ],
            unit="u",
        )

    def backward(self, parameters: tuple[View, View], gradients: tuple[View, View]) -> str:
        """Run backward from the loss, whose gradient is one, and drop what it read."""
        self.step.free(self.y)
        self.step.allocate(self.seed)
        self.step.fill("seed", self.seed.all, 1.0)
        done = self.step.compute(
            "backward",
            Action.BACKWARD,
            [
                (Role.INPUT, self.x.all),
                (Role.SAVED, self.saved.all),
                *((Role.PARAMETER, view) for view in parameters),
                (Role.OUTPUT_GRADIENT, self.seed.all),
                *((Role.GRADIENT, view) for view in gradients),
            ],
            unit="u",
        )
        self.step.free(self.x, self.saved, self.seed)
        return done


def fsdp2() -> Schedule:
    """Hybrid sharding on 2 x (2 x 2) ranks; kept over the inner ranks after forward."""
    mesh = Mesh(
        axes=tuple(Axis(name=name, size=2) for name in ("replicate", "outer", "inner")),
        joined=(Joined(name="data", axes=("outer", "inner")),),
    )
    placed, blocks = pieces(w=0, b=8), (0, 8)
    run = Runtime(
        "fsdp2",
        mesh,
        Layout(name="cut", pieces=placed, elements=12, axis="data", blocks=blocks),
        Layout(name="inner", pieces=placed, elements=12, axis="inner", blocks=blocks),
        Layout(name="whole", pieces=placed, elements=12),
        Layout(name="alone", pieces=pieces(w=0, b=5), elements=8),
    )
    build, step = run.build, run.step
    data, inner = build.group("data", "outer", "inner"), build.group("inner", "inner")
    replicate = build.group("replicate", "replicate")
    build.group("outer", "outer")
    shard = run.state("shard", 3, Kind.PARAMETER, "cut", "data")
    gathered, whole = run.narrow("gathered", 12, "cut"), run.narrow("whole", 12, "whole")
    cast = step.copy("cast", shard.all, gathered.own("data", 3))
    done = step.all_gather("gather", data, gathered.own("data", 3), gathered.all, after=[cast])
    step.copy("copy_out", gathered.all, whole.all, by_parameter=True, after=[done])
    step.free(gathered, uses=[done])
    run.forward(whole[:5], whole[8:11])
    near = run.narrow("near", 6, "inner", "inner")
    kept = step.copy("reshard", whole.all, near.all, by_parameter=True)
    step.free(whole)
    again, whole = run.narrow("again", 12, "inner"), run.narrow("whole_again", 12, "whole")
    done = step.all_gather("gather_again", inner, near.all, again.all, after=[kept])
    step.copy("copy_out_again", again.all, whole.all, by_parameter=True, after=[done])
    step.free(near, again, uses=[done])
    made = run.narrow("made", 8, "alone")
    run.backward((whole[:5], whole[8:11]), (made[:5], made[5:]))
    step.free(whole)
    staging, gradient = run.narrow("staging", 12, "cut"), run.narrow("gradient", 3, "cut", "data")
    copied = step.copy("copy_in", made.all, staging.all, by_parameter=True, divisor=8)
    step.free(made)
    step.reduce_scatter("reduce", data, staging.all, gradient.all, after=[copied])
    done = step.all_reduce("all_reduce", replicate, gradient.all)
    step.free(staging, uses=["step/reduce"])
    wide = build.buffer("wide", 3, layout="cut", shard="data")
    step.allocate(wide)
    step.copy("widen", gradient.all, wide.all, after=[done])
    step.free(gradient, uses=[done])
    operands = [(Role.GRADIENT, wide.all), (Role.PARAMETER, shard.all)]
    step.compute("update", Action.UPDATE, operands, rule=SGD())
    step.free(wide)
    return build.schedule(contract(8, "replicate", "outer", "inner"))


def deepspeed() -> Schedule:
    """Stage 2 on 4 ranks: buckets are all-reduced, and each rank copies its slices out of them."""
    run = Runtime(
        "deepspeed",
        Mesh(axes=(Axis(name="data", size=4),)),
        Layout(name="flat", pieces=pieces(w=0, b=5), elements=16, axis="data"),
        Layout(name="bucket_w", pieces=pieces(w=0), elements=5),
        Layout(name="bucket_b", pieces=pieces(b=0), elements=3),
    )
    build, step = run.build, run.step
    data = build.group("data", "data")
    flat = build.buffer(
        "flat", 16, dtype=DType.BF16, kind=Kind.PARAMETER, layout="flat", persistent=True
    )
    run.setup.allocate(flat)
    run.setup.compute("flat/initialize", Action.INITIALIZE, [(Role.PARAMETER, flat.all)])
    master = run.state("master", 4, Kind.MASTER, "flat", "data")
    run.forward(flat[:5], flat[5:8])
    made = {name: run.narrow(f"made_{name}", SIZES[name], f"bucket_{name}") for name in SIZES}
    run.backward((flat[:5], flat[5:8]), (made["w"].all, made["b"].all))
    gradient = run.narrow("gradient", 4, "flat", "data")
    padding = View(buffer="gradient", start=8, size=8, layout="flat")
    step.fill("pad", padding, 0.0)
    for name, start in (("b", 5), ("w", 0)):
        size = SIZES[name]
        bucket = run.narrow(f"bucket_{name}", size, f"bucket_{name}")
        copied = step.copy(f"divide_{name}", made[name].all, bucket.all, divisor=4)
        step.free(made[name])
        reduced = step.all_reduce(f"reduce_{name}", data, bucket.all, after=[copied])
        window = View(buffer=bucket.name, start=start, size=size, layout="flat", origin=0)
        own = View(buffer="gradient", start=start, size=size, layout="flat")
        step.copy(f"slice_{name}", window, own, after=[reduced])
        step.free(bucket)
    wide = build.buffer("wide", 4, layout="flat", shard="data")
    step.allocate(wide)
    step.copy("widen", gradient.all, wide.all)
    step.free(gradient)
    operands = [(Role.GRADIENT, wide.all), (Role.MASTER, master.all)]
    step.compute("update", Action.UPDATE, operands, rule=SGD())
    step.free(wide)
    cast = step.copy("cast", master.all, flat.own("data", 4))
    gather = step.all_gather("gather", data, flat.own("data", 4), flat.all, after=[cast])
    step.host_wait("wait", gather)
    return build.schedule(contract(4, "data"))


def megatron() -> Schedule:
    """One buffer of parameters and one of gradients on 2 ranks; each bucket reduced in place."""
    placed, blocks = pieces(w=0, b=8), (0, 8)
    run = Runtime(
        "megatron",
        Mesh(axes=(Axis(name="data", size=2),)),
        Layout(name="cut", pieces=placed, elements=12, axis="data", blocks=blocks),
        Layout(name="whole", pieces=placed, elements=12),
        Layout(name="alone", pieces=pieces(w=0, b=5), elements=8),
    )
    build, step = run.build, run.step
    data = build.group("data", "data")
    held = run.state("held", 12, Kind.PARAMETER, "whole", None)
    master = run.state("master", 6, Kind.MASTER, "cut", "data")
    run.forward(held[:5], held[8:11])
    made = build.buffer("made", 12, layout="whole", kind=Kind.GRADIENT, persistent=True)
    run.setup.allocate(made)
    step.fill("zero", made.all, 0.0)
    alone = build.buffer("alone", 8, layout="alone")
    step.allocate(alone)
    run.backward((held[:5], held[8:11]), (alone[:5], alone[5:]))
    step.copy("collect", alone.all, made.all, by_parameter=True, accumulate=True)
    step.free(alone)
    copied = step.copy("scale", made.all, made.all, divisor=2)
    gradient = build.buffer("gradient", 6, layout="cut", shard="data")
    step.allocate(gradient)
    for name, start, size in (("b", 8, 2), ("w", 0, 4)):
        bucket, own = made[start : start + 2 * size], made.own("data", size, start)
        reduced = step.reduce_scatter(f"reduce_{name}", data, bucket, own, after=[copied])
        at = start // 2
        step.copy(f"take_{name}", own, gradient[at : at + size], after=[reduced])
    operands = [(Role.GRADIENT, gradient.all), (Role.MASTER, master.all)]
    step.compute("update", Action.UPDATE, operands, rule=SGD())
    step.free(gradient)
    put = step.copy("put", master.all, held.all, by_parameter=True)
    for name, start, size in (("w", 0, 4), ("b", 8, 2)):
        own = held.own("data", size, start)
        gather = step.all_gather(
            f"gather_{name}", data, own, held[start : start + 2 * size], after=[put]
        )
    step.host_wait("wait", gather)
    return build.schedule(contract(2, "data"))


def owners(
    cuts: tuple[int, ...] = (0, 4, 4, 7, 8), parts: tuple[tuple[int, int], ...] = ((0, 5), (5, 3))
) -> Schedule:
    """Shards of unlike size, one of them empty, as ZeroRedundancyOptimizer of torch 2 has them.

    Gradients are all-reduced, each rank updates what it owns of each of `parts` (start, size) of
    the whole, and the owners send their parameters to all.
    """
    run = Runtime(
        "owners",
        Mesh(axes=(Axis(name="data", size=len(cuts) - 1),)),
        Layout(name="flat", pieces=pieces(w=0, b=5), elements=8, axis="data", cuts=cuts),
        Layout(name="whole", pieces=pieces(w=0, b=5), elements=8),
    )
    build, step = run.build, run.step
    data = build.group("data", "data")
    largest = max(high - low for low, high in pairwise(cuts))
    flat = build.buffer(
        "flat", 8, dtype=DType.BF16, kind=Kind.PARAMETER, layout="flat", persistent=True
    )
    run.setup.allocate(flat)
    run.setup.compute("flat/initialize", Action.INITIALIZE, [(Role.PARAMETER, flat.all)])
    master = run.state("master", largest, Kind.MASTER, "flat", "data")
    run.forward(flat[:5], flat[5:8])
    made = run.narrow("made", 8, "whole")
    run.backward((flat[:5], flat[5:8]), (made[:5], made[5:]))
    divided = step.copy("divide", made.all, made.all, divisor=len(cuts) - 1)
    last = step.all_reduce("reduce", data, made.all, after=[divided])
    gradient = build.buffer("gradient", largest, layout="flat", shard="data")
    wide = build.buffer("wide", 8)
    step.allocate(gradient, wide)
    step.copy("widen", made.all, wide.all, after=[last])
    for number, (start, size) in enumerate(parts):
        own = gradient.window("flat", size, start)
        step.copy(f"slice{number}", wide.window("flat", size, start, origin=start), own)
    for number, (start, size) in enumerate(parts):
        operands = [
            (Role.GRADIENT, gradient.window("flat", size, start)),
            (Role.MASTER, master.window("flat", size, start)),
        ]
        step.compute(f"update{number}", Action.UPDATE, operands, rule=SGD())
    step.free(made, gradient, wide, uses=[last])
    last = step.copy(
        "cast", master.window("flat", 8), flat.window("flat", 8, origin=0), after=[last]
    )
    for root, (low, high) in enumerate(pairwise(cuts)):
        last = step.broadcast(f"send{root}", data, flat[low:high], root=root, after=[last])
    step.host_wait("wait", last)
    return build.schedule(contract(len(cuts) - 1, "data"))
