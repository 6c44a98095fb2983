"""The schedule of a plan of training with experts (`experts_by_hand`): all on one stream.

Layers exchange rows with their weights, run the experts of the rank, exchange back and add up.
Stages of a pipeline run one micro-batch after the other.
"""

from collections.abc import Iterable
from dataclasses import replace

from experts_by_hand import BIAS, CLIP, HIDDEN, WIDE, Plan

from zsim.dtype import DType
from zsim.model.model import Parameter
from zsim.schedule.builder import COMPUTE, BufferHandle, RoleBuilder, ScheduleBuilder
from zsim.schedule.counts import NamedCount, RowIndex
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Action, Reduction, Role, View
from zsim.schedule.operation_list import OperationList
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Place, Pool, Schedule
from zsim.strategy.optimizer_rule import SGD

SOURCE, EXPERT = RowIndex.SOURCE, RowIndex.EXPERT
SCALE = "loss_scale"
Pairs = Iterable[tuple[Role, View]]


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan."""
    stages = {"pipeline": plan.stages} if plan.stages > 1 else {}
    tensor = {"tensor": plan.tensor} if plan.tensor > 1 else {}
    build = ScheduleBuilder.of("experts", **stages, data=plan.data, expert=plan.ranks, **tensor)
    copies = ("data", *tensor)
    build.group("ep", "expert")
    build.group("edp", *copies)
    build.group("all", "data", "expert", *tensor)
    build.group("dense", "data", "expert")
    build.group("world", *stages, "data", "expert", *tensor)
    build.group("owners", *stages, "expert")
    if tensor:
        build.group("sequence", "tensor")
    if stages:
        build.group("stages", "pipeline")
    build.pools.append(replace(Pool(name="host"), place=Place.HOST))
    if plan.half:
        build.scalar(SCALE, 8.0)
    count = build.count(
        "routed",
        "ep",
        experts=plan.experts,
        sent=plan.sent,
        maximum=None if plan.padded else plan.sent * plan.ranks,
        drops=plan.drops,
    )
    for parameter in plan.model().parameters:
        piece = Piece(parameter=parameter.name, start=0, size=parameter.elements)
        cut = "expert" if _is_cut(plan, parameter.name) else None
        build.layout(
            Layout(name=parameter.name, pieces=(piece,), elements=parameter.elements, axis=cut)
        )
    for stage in range(plan.stages):
        role: RoleBuilder = build
        if stages:
            role = build.role(f"stage{stage}", Span(axis="pipeline", start=stage, end=stage + 1))
        Stage(plan, role, count, stage).write()
    return build.schedule(_contract(plan, tensor))


def _contract(plan: Plan, tensor: Iterable[str]) -> Contract:
    return Contract(
        parameters=tuple(
            LogicalParameter(
                name=each.name,
                elements=each.elements,
                frozen=each.frozen,
                load=each.load,
                rule=BIAS if each.load else SGD(),
            )
            for each in plan.model().parameters
        ),
        loss_divisor=plan.divisor,
        data_axes=("data", "expert", *tensor),
    )


def _is_cut(plan: Plan, parameter: str) -> bool:
    """Return True if expert ranks hold parts of a parameter."""
    return parameter.startswith("experts") and not plan.whole


class Stage:
    """The program of a pipeline stage, a phase at a time."""

    def __init__(self, plan: Plan, build: RoleBuilder, count: NamedCount, stage: int) -> None:
        self.plan = plan
        self.build = build
        self.step: OperationList = build.step
        self.count = count
        self.stage = stage
        own = plan.layers // plan.stages
        self.layers = range(stage * own, (stage + 1) * own)
        self.is_first, self.is_last = stage == 0, stage == plan.stages - 1
        self.trained: dict[str, BufferHandle] = {}
        self.sums: dict[str, BufferHandle] = {}
        self.loads: dict[str, BufferHandle] = {}
        self.alive: list[BufferHandle] = []
        self.prefix = ""
        self.batch = 0

    def write(self) -> None:
        """Write setup and one step."""
        for parameter in self.plan.model().parameters:
            if self._has(parameter.name):
                self.parameter(parameter)
        for batch in range(self.plan.micro_batches):
            self.batch, self.prefix = batch, f"mb{batch}"
            self.micro_batch()
        self.balance()
        self.update()

    def _has(self, name: str) -> bool:
        ends = {"embed": self.is_first, "head": self.is_last}
        return ends[name] if name in ends else int(name[-1]) in self.layers

    def parameter(self, parameter: Parameter) -> None:
        """Declare a parameter, and the sum of its gradients or loads."""
        name, build, plan = parameter.name, self.build, self.plan
        cut = "expert" if _is_cut(plan, name) else None
        size = parameter.elements // (plan.ranks if cut else 1)
        self.trained[name] = build.buffer(
            name, size, kind=Kind.PARAMETER, layout=name, shard=cut, persistent=True
        )
        if parameter.load:
            self.loads[name] = build.buffer(f"{name}/load", size)
        else:
            self.sums[name] = build.buffer(
                f"{name}/sum", size, kind=Kind.GRADIENT, layout=name, shard=cut
            )
        build.setup.allocate(self.trained[name])
        build.setup.compute(
            f"{name}/initialize", Action.INITIALIZE, [(Role.PARAMETER, self.trained[name].all)]
        )

    def new(self, name: str, elements: int, dtype: DType = DType.FP32) -> BufferHandle:
        """Allocate a buffer of this micro-batch."""
        made = self.build.buffer(name, elements, dtype=dtype)
        self.step.allocate(made)
        self.alive.append(made)
        return made

    def rows(self, name: str, layer: int, own: RowIndex, width: int = WIDE) -> BufferHandle:
        """Allocate a buffer of counted rows of this micro-batch."""
        made = self.build.counted(name, self.count, own, layer=layer, width=width)
        self.step.allocate(made, micro_batch=self.batch)
        self.alive.append(made)
        return made

    def run(self, unit: str, segment: int, action: Action, operands: Pairs) -> str:
        """Run a segment."""
        return self.step.compute(
            f"{self.prefix}/{unit}/{segment}/{action}",
            action,
            operands,
            unit=unit,
            segment=segment,
            micro_batch=self.batch,
        )

    def exchange(self, name: str, source: BufferHandle, target: BufferHandle) -> None:
        """Exchange rows over expert ranks; they stay where each rank has all experts."""
        if self.plan.whole:
            self.step.copy(f"{self.prefix}/{name}", source.all, target.all)
        else:
            self.step.all_to_all(
                f"{self.prefix}/{name}", "ep", source.all, target.all, stream=COMPUTE
            )

    def seed(self, name: str) -> BufferHandle:
        """Return the gradient of a loss: 1, times the loss scale."""
        made = self.new(f"{name}/seed", 1)
        scalar = SCALE if self.plan.half else None
        self.step.fill(f"{self.prefix}/{name}/seed", made.all, 1.0, scalar=scalar)
        return made

    def micro_batch(self) -> None:
        """Run forward and backward of a micro-batch."""
        hidden = [self.embed() if self.is_first else self.receive(f"h{self.layers.start}", -1)]
        layers: list[Layer] = []
        for layer in self.layers:
            hidden.append(self.new(f"h{layer + 1}", HIDDEN))
            layers.append(Layer(self, layer, hidden[-2], hidden[-1]))
            layers[-1].forward()
        if self.is_last:
            slope = self.loss(hidden[-1])
        else:
            self.send(hidden[-1], 1)
            slope = self.receive(f"slope{self.layers.stop}", 1)
        for each in reversed(layers):
            slope = each.backward(slope)
        if self.is_first:
            self.embed_back(slope)
        else:
            self.send(slope, -1)
        self.step.free(*self.alive)
        self.alive.clear()

    def send(self, value: BufferHandle, offset: int) -> None:
        """Send a value to the next or the previous stage."""
        name = f"{self.prefix}/{value.name}/send"
        self.step.send(name, "stages", value.all, offset, stream=COMPUTE)

    def receive(self, name: str, offset: int) -> BufferHandle:
        """Receive a value from the next or the previous stage."""
        made = self.new(name, HIDDEN)
        self.step.receive(
            f"{self.prefix}/{name}/receive", "stages", made.all, offset, stream=COMPUTE
        )
        return made

    def embed(self) -> BufferHandle:
        """Load a batch and embed it."""
        self.read = self.new("batch", HIDDEN, DType.INT64)
        self.step.compute(
            f"{self.prefix}/load",
            Action.LOAD,
            [(Role.OUTPUT, self.read.all)],
            micro_batch=self.batch,
        )
        made = self.new("h0", HIDDEN)
        read = ((Role.INPUT, self.read.all), (Role.PARAMETER, self.trained["embed"].all))
        self.run("embed", 0, Action.FORWARD, [*read, (Role.OUTPUT, made.all)])
        return made

    def embed_back(self, slope: BufferHandle) -> None:
        """Run the backward of the embedding."""
        gradient = self.new("embed/gradient", HIDDEN)
        read = ((Role.INPUT, self.read.all), (Role.PARAMETER, self.trained["embed"].all))
        made = ((Role.OUTPUT_GRADIENT, slope.all), (Role.GRADIENT, gradient.all))
        self.run("embed", 0, Action.BACKWARD, [*read, *made])
        self.add("embed", gradient)

    def loss(self, last: BufferHandle) -> BufferHandle:
        """Run forward and backward of the loss."""
        loss = self.new("loss", 1)
        read = ((Role.INPUT, last.all), (Role.PARAMETER, self.trained["head"].all))
        self.run("loss", 0, Action.FORWARD, [*read, (Role.OUTPUT, loss.all)])
        seed = self.seed("loss")
        slope, gradient = self.new("slope", HIDDEN), self.new("head/gradient", HIDDEN)
        made = (
            (Role.OUTPUT_GRADIENT, seed.all),
            (Role.GRADIENT, gradient.all),
            (Role.INPUT_GRADIENT, slope.all),
        )
        self.run("loss", 0, Action.BACKWARD, [*read, *made])
        self.add("head", gradient)
        return slope

    def add(self, name: str, gradient: BufferHandle) -> None:
        """Add a gradient to its sum, as a part of the mean."""
        total = self.sums[name]
        if not self.batch:
            self.step.allocate(total)
        self.step.copy(
            f"{self.prefix}/{name}/add",
            gradient.all,
            total.all,
            accumulate=self.batch > 0,
            divisor=self.plan.divisor,
        )

    def count_load(self, name: str, chosen: BufferHandle) -> None:
        """Add the rows of each expert to the load of a bias."""
        total = self.loads[name]
        if not self.batch:
            self.step.allocate(total)
        self.step.copy(
            f"{self.prefix}/{name}/count", chosen.all, total.all, accumulate=self.batch > 0
        )

    def balance(self) -> None:
        """Update the biases of experts from their loads."""
        for name, load in self.loads.items():
            self.step.all_reduce(f"{name}/reduce", "all", load.all, stream=COMPUTE)
            operands = [(Role.PARAMETER, self.trained[name].all), (Role.GRADIENT, load.all)]
            self.step.compute(f"{name}/update", Action.UPDATE, operands, rule=BIAS)
            self.step.free(load)

    def update(self) -> None:
        """Reduce the gradients and apply them, unless one overflows."""
        for name, total in self.sums.items():
            group = "edp" if _is_cut(self.plan, name) else "all"
            self.step.all_reduce(f"{name}/reduce", group, total.all, stream=COMPUTE)
        if not self.plan.half:
            self.apply()
        else:
            flag = self.build.buffer("overflow", 1)
            self.step.allocate(flag)
            gradients = [(Role.GRADIENT, each.all) for each in self.sums.values()]
            self.step.compute(
                "overflow/measure", Action.FINITE, [*gradients, (Role.OUTPUT, flag.all)]
            )
            decided = self.step.all_reduce(
                "overflow/reduce", "world", flag.all, reduction=Reduction.MAX, stream=COMPUTE
            )
            outer, self.step = self.step, self.step.side("apply")
            self.apply()
            skips = outer.side("skip")
            outer.branch("branch", flag.all, skips, self.step, after=[decided])
            self.step = outer
            self.step.free(flag)
        self.step.free(*self.sums.values())

    def apply(self) -> None:
        """Unscale, clip and apply the gradients."""
        for name, total in self.sums.items() if self.plan.half else ():
            operands = [(Role.GRADIENT, total.all)]
            self.step.compute(f"{name}/unscale", Action.UNSCALE, operands, scalars=[SCALE])
        if self.plan.clipped:
            self.clip()
        for name, total in self.sums.items():
            operands = [(Role.PARAMETER, self.trained[name].all), (Role.GRADIENT, total.all)]
            self.step.compute(f"{name}/update", Action.UPDATE, operands, rule=SGD())

    def clip(self) -> None:
        """Clip gradients by the norm of all of them, each expert counted once."""
        step = self.step
        squares = {each: self.build.buffer(f"norm/{each}", 1) for each in ("dense", "experts")}
        step.allocate(*squares.values())
        for what, made in squares.items():
            own = [
                (Role.GRADIENT, total.all)
                for name, total in self.sums.items()
                if _is_cut(self.plan, name) is (what == "experts")
            ]
            if own:
                step.compute(f"norm/{what}/measure", Action.NORM, [*own, (Role.OUTPUT, made.all)])
            else:
                step.fill(f"norm/{what}/none", made.all, 0.0)
        step.all_reduce("norm/experts/reduce", "owners", squares["experts"].all, stream=COMPUTE)
        if self.plan.stages > 1:
            step.all_reduce("norm/dense/reduce", "stages", squares["dense"].all, stream=COMPUTE)
        step.copy("norm/sum", squares["experts"].all, squares["dense"].all, accumulate=True)
        for name, total in self.sums.items():
            operands = [(Role.INPUT, squares["dense"].all), (Role.GRADIENT, total.all)]
            step.compute(f"{name}/clip", Action.CLIP, operands, rule=CLIP)
        step.free(*squares.values())


class Layer:
    """A layer in a micro-batch."""

    def __init__(self, stage: Stage, layer: int, before: BufferHandle, after: BufferHandle) -> None:
        self.stage, self.plan = stage, stage.plan
        self.layer = layer
        self.unit = f"layer{layer}"
        self.before, self.after = before, after
        self.weights = stage.trained[f"experts{layer}"]
        self.there = SOURCE if stage.plan.whole else EXPERT
        names = (f"router{layer}", *([f"bias{layer}"] if stage.plan.bias else []))
        self.routers = [(Role.PARAMETER, stage.trained[name].all) for name in names]
        self.shared: list[BufferHandle] = []

    def forward(self) -> None:
        """Route, exchange, run experts, exchange back, combine."""
        stage, unit, plan = self.stage, self.unit, self.plan
        if plan.shared:
            self.shared = [stage.new(f"{unit}/shared", HIDDEN)]
            common = (*self._common, (Role.OUTPUT, self.shared[0].all))
            stage.run(f"shared{self.layer}", 0, Action.FORWARD, common)
        self.route()
        if plan.auxiliary is not None:
            self.auxiliary()
        rows = stage.rows(f"{unit}/rows", self.layer, SOURCE)
        self.permute(Action.FORWARD, rows)
        self.recv = stage.rows(f"{unit}/recv", self.layer, self.there)
        self.got = stage.rows(f"{unit}/got", self.layer, self.there, 1)
        stage.exchange(f"{unit}/dispatch", rows, self.recv)
        stage.exchange(f"{unit}/dispatch_probs", self.probs, self.got)
        out = stage.rows(f"{unit}/out", self.layer, self.there)
        stage.run(unit, 2, Action.FORWARD, [*self._expert_reads, (Role.OUTPUT, out.all)])
        self.back = stage.rows(f"{unit}/back", self.layer, SOURCE)
        stage.exchange(f"{unit}/combine", out, self.back)
        stage.run(unit, 3, Action.FORWARD, [*self._summands, (Role.OUTPUT, self.after.all)])

    @property
    def _common(self) -> list[tuple[Role, View]]:
        weights = self.stage.trained[f"common{self.layer}"]
        return [(Role.INPUT, self.before.all), (Role.PARAMETER, weights.all)]

    @property
    def _expert_reads(self) -> list[tuple[Role, View]]:
        rows = ((Role.INPUT, each.all) for each in (self.recv, self.got))
        return [*rows, (Role.PARAMETER, self.weights.all)]

    @property
    def _summands(self) -> list[tuple[Role, View]]:
        read = (self.before, self.back, *self.shared, self.map)
        return [(Role.INPUT, each.all) for each in read]

    def route(self) -> None:
        """Choose experts, and exchange the counts of rows."""
        stage, unit, plan = self.stage, self.unit, self.plan
        self.probs = stage.rows(f"{unit}/probs", self.layer, SOURCE, 1)
        made = [self.probs]
        if plan.auxiliary is not None:
            self.scores = stage.new(f"{unit}/scores", plan.experts)
            made.append(self.scores)
        self.chosen = sent = stage.new(f"{unit}/chosen", plan.experts, DType.INT64)
        made.append(self.chosen)
        if plan.drops is not None:
            sent = stage.new(f"{unit}/kept", plan.experts, DType.INT64)
            made.append(sent)
        self.map = stage.new(f"{unit}/map", plan.sent, DType.INT64)
        made.append(self.map)
        read = ((Role.INPUT, self.before.all), *self.routers)
        outputs = ((Role.OUTPUT, each.all) for each in made)
        stage.run(unit, 0, Action.FORWARD, [*read, *outputs])
        if plan.bias:
            stage.count_load(f"bias{self.layer}", self.chosen)
        if not (plan.whole or plan.padded):
            self.counts(sent)

    def counts(self, sent: BufferHandle) -> None:
        """Exchange the counts, and read them on the host."""
        stage, unit, plan = self.stage, self.unit, self.plan
        asked = stage.new(f"{unit}/asked", plan.experts, DType.INT64)
        host = stage.build.buffer(f"{unit}/host", plan.experts, dtype=DType.INT64, pool="host")
        stage.step.allocate(host)
        stage.alive.append(host)
        stage.exchange(f"{unit}/counts", sent, asked)
        copied = stage.step.copy(f"{stage.prefix}/{unit}/to_host", asked.all, host.all)
        stage.step.read_counts(
            f"{stage.prefix}/{unit}/read",
            copied,
            host.all,
            stage.count.name,
            layer=self.layer,
            micro_batch=stage.batch,
        )

    def permute(self, action: Action, rows: BufferHandle) -> None:
        """Copy tokens for their experts."""
        read = ((Role.INPUT, each.all) for each in (self.before, self.map))
        self.stage.run(self.unit, 1, action, [*read, (Role.OUTPUT, rows.all)])

    def auxiliary(self) -> None:
        """Run forward and backward of the auxiliary loss, on loads summed over its scope."""
        stage, unit, plan = self.stage, self.unit, self.plan
        name = f"auxiliary{self.layer}"
        load = stage.new(f"{unit}/load", plan.experts, DType.INT64)
        stage.step.copy(f"{stage.prefix}/{unit}/load", self.chosen.all, load.all)
        group = {"sequence": "sequence", "micro_batch": "all", "batch": "all"}.get(
            str(plan.auxiliary)
        )
        if group is not None:
            path = f"{stage.prefix}/{unit}/load/reduce"
            stage.step.all_reduce(path, group, load.all, stream=COMPUTE)
        if plan.auxiliary == "batch":
            load = self.so_far(load)
        loss = stage.new(f"{unit}/auxiliary", 1)
        read = [(Role.INPUT, self.scores.all), (Role.INPUT, load.all)]
        stage.run(name, 0, Action.FORWARD, [*read, (Role.OUTPUT, loss.all)])
        self.dscores = stage.new(f"{unit}/dscores", plan.experts)
        seed = (Role.OUTPUT_GRADIENT, stage.seed(name).all)
        made = (Role.INPUT_GRADIENT, self.dscores.all)
        stage.run(name, 0, Action.BACKWARD, [*read, seed, made])

    def so_far(self, load: BufferHandle) -> BufferHandle:
        """Return the sum of the loads of this micro-batch and those before it."""
        stage = self.stage
        total = stage.build.buffer(f"{self.unit}/so_far", self.plan.experts, dtype=DType.INT64)
        if not stage.batch:
            stage.step.allocate(total)
        path = f"{stage.prefix}/{self.unit}/so_far"
        stage.step.copy(path, load.all, total.all, accumulate=stage.batch > 0)
        if stage.batch == self.plan.micro_batches - 1:
            stage.alive.append(total)
        return total

    def backward(self, slope: BufferHandle) -> BufferHandle:
        """Return the gradient of the hidden state before the layer."""
        stage, unit, layer = self.stage, self.unit, self.layer
        below = [stage.new(f"{unit}/below{place}", HIDDEN) for place in range(3)]
        dback = stage.rows(f"{unit}/dback", layer, SOURCE)
        dshared = [stage.new(f"{unit}/dshared", HIDDEN)] if self.shared else []
        towards = ((Role.INPUT_GRADIENT, each.all) for each in (below[0], dback, *dshared))
        outer = (Role.OUTPUT_GRADIENT, slope.all)
        stage.run(unit, 3, Action.BACKWARD, [*self._summands, outer, *towards])
        drows, dprobs = self.experts_backward(dback)
        read = ((Role.INPUT, each.all) for each in (self.before, self.map))
        slopes = ((Role.OUTPUT_GRADIENT, drows.all), (Role.INPUT_GRADIENT, below[1].all))
        stage.run(unit, 1, Action.BACKWARD, [*read, *slopes])
        self.route_backward(dprobs, below[2])
        if self.shared:
            below.append(self.shared_backward(dshared[0]))
        for place, each in enumerate(below[1:]):
            path = f"{stage.prefix}/{unit}/sum{place}"
            stage.step.copy(path, each.all, below[0].all, accumulate=True)
        return below[0]

    def experts_backward(self, dback: BufferHandle) -> tuple[BufferHandle, BufferHandle]:
        """Run the backward of experts; return the gradients of rows and of their weights."""
        stage, unit, layer = self.stage, self.unit, self.layer
        if self.plan.recomputed:
            self.recompute()
        dout = stage.rows(f"{unit}/dout", layer, self.there)
        stage.exchange(f"{unit}/combine_back", dback, dout)
        drecv = stage.rows(f"{unit}/drecv", layer, self.there)
        dgot = stage.rows(f"{unit}/dgot", layer, self.there, 1)
        gradient = stage.new(f"{unit}/experts/gradient", self.weights.buffer.elements)
        made = (
            (Role.OUTPUT_GRADIENT, dout.all),
            (Role.GRADIENT, gradient.all),
            *((Role.INPUT_GRADIENT, each.all) for each in (drecv, dgot)),
        )
        stage.run(unit, 2, Action.BACKWARD, [*self._expert_reads, *made])
        stage.add(f"experts{layer}", gradient)
        drows = stage.rows(f"{unit}/drows", layer, SOURCE)
        dprobs = stage.rows(f"{unit}/dprobs", layer, SOURCE, 1)
        stage.exchange(f"{unit}/dispatch_back", drecv, drows)
        stage.exchange(f"{unit}/probs_back", dgot, dprobs)
        return drows, dprobs

    def recompute(self) -> None:
        """Copy and exchange tokens again, by the routing that was saved, and run experts again."""
        stage, unit = self.stage, self.unit
        rows = stage.rows(f"{unit}/again/rows", self.layer, SOURCE)
        self.permute(Action.RECOMPUTE, rows)
        self.recv = stage.rows(f"{unit}/again/recv", self.layer, self.there)
        stage.exchange(f"{unit}/dispatch_again", rows, self.recv)
        out = stage.rows(f"{unit}/again/out", self.layer, self.there)
        stage.run(unit, 2, Action.RECOMPUTE, [*self._expert_reads, (Role.OUTPUT, out.all)])

    def route_backward(self, dprobs: BufferHandle, below: BufferHandle) -> None:
        """Run the backward of the router."""
        stage, unit = self.stage, self.unit
        routed = stage.new(f"{unit}/router/gradient", HIDDEN)
        slopes = [dprobs, *([self.dscores] if self.plan.auxiliary is not None else [])]
        operands = (
            (Role.INPUT, self.before.all),
            *self.routers,
            *((Role.OUTPUT_GRADIENT, each.all) for each in slopes),
            (Role.GRADIENT, routed.all),
            (Role.INPUT_GRADIENT, below.all),
        )
        stage.run(unit, 0, Action.BACKWARD, operands)
        stage.add(f"router{self.layer}", routed)

    def shared_backward(self, slope: BufferHandle) -> BufferHandle:
        """Run the backward of the shared expert."""
        stage, name = self.stage, f"common{self.layer}"
        gradient = stage.new(f"{name}/gradient", HIDDEN)
        below = stage.new(f"{self.unit}/below3", HIDDEN)
        made = (
            (Role.OUTPUT_GRADIENT, slope.all),
            (Role.GRADIENT, gradient.all),
            (Role.INPUT_GRADIENT, below.all),
        )
        stage.run(f"shared{self.layer}", 0, Action.BACKWARD, [*self._common, *made])
        stage.add(name, gradient)
        return below
