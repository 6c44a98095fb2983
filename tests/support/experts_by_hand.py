"""Training with routed experts, written by hand: a model, and schedules on expert and data ranks.

Each layer routes, copies rows for experts, exchanges them with their weights, runs the experts of
the rank, exchanges back and adds up. All operations are on one stream. With `whole`, every rank
holds all experts of a layer instead, and tokens stay (ZeRO-3 without expert parallelism).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.schedule.builder import COMPUTE, BufferHandle, ScheduleBuilder
from zsim.schedule.counts import NamedCount, RowIndex
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Role, View
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Place, Pool, Schedule
from zsim.strategy.optimizer_rule import SGD

HIDDEN, WIDE, WEIGHTS = 6, 4, 3
"""Elements of a hidden state, of a row, and of the weights of an expert."""
SOURCE, EXPERT = RowIndex.SOURCE, RowIndex.EXPERT


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the training."""

    ranks: int = 2
    data: int = 1
    experts: int = 4
    layers: int = 2
    micro_batches: int = 2
    sent: int = 12
    whole: bool = False
    padded: bool = False

    @property
    def replicas(self) -> int:
        """Ranks with different data."""
        return self.ranks * self.data

    def model(self) -> Model:
        """Return the model, whose values have the sizes of a replica."""
        units = [_unit("embed", (BATCH,), (_value("h0", HIDDEN),), embed=HIDDEN)]
        for layer in range(self.layers):
            units.append(self._layer(layer))
        last = f"h{self.layers}"
        units.append(_unit("loss", (last,), (_value("loss", 1),), head=HIDDEN))
        batch = Value(name=BATCH, elements=HIDDEN, dtype=DType.INT64, requires_gradient=False)
        return Model(name="experts by hand", units=tuple(units), batch=batch)

    def _layer(self, layer: int) -> Unit:
        def named(what: str) -> str:
            return f"{what}{layer}"

        def kept(what: str, elements: int) -> Value:
            name = named(what)
            return Value(name=name, elements=elements, dtype=DType.INT64, requires_gradient=False)

        routed = (
            _value(named("probs"), self.sent),
            kept("chosen", self.experts),
            kept("map", self.sent),
        )
        before, after = f"h{layer}", f"h{layer + 1}"
        rows, out = named("rows"), named("out")
        return Unit(
            name=f"layer{layer}",
            parameters=(
                Parameter(name=named("router"), shape=(HIDDEN,)),
                Parameter(name=named("experts"), shape=(self.experts, WEIGHTS)),
            ),
            segments=(
                Segment(inputs=(before,), outputs=routed, parameters=(named("router"),)),
                Segment(
                    inputs=(before, named("map")),
                    outputs=(_value(rows, self.sent * WIDE),),
                ),
                Segment(
                    inputs=(rows, named("probs")),
                    outputs=(_value(out, self.sent * WIDE),),
                    parameters=(named("experts"),),
                    experts=self.experts,
                ),
                Segment(
                    inputs=(before, out, named("map")),
                    outputs=(_value(after, HIDDEN),),
                ),
            ),
        )

    def schedule(self) -> Schedule:
        """Return the schedule."""
        return _Writer(self).write()


def _value(name: str, elements: int) -> Value:
    return Value(name=name, elements=elements, dtype=DType.FP32)


def _unit(
    name: str, inputs: tuple[str, ...], outputs: tuple[Value, ...], **parameters: int
) -> Unit:
    return Unit(
        name=name,
        parameters=tuple(Parameter(name=each, shape=(n,)) for each, n in parameters.items()),
        segments=(Segment(inputs=inputs, outputs=outputs, parameters=tuple(parameters)),),
    )


class _Writer:
    """The schedule, a phase at a time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.build = build = ScheduleBuilder.of("experts", data=plan.data, expert=plan.ranks)
        self.ep = build.group("ep", "expert")
        self.edp = build.group("edp", "data")
        self.all = build.group("all", "data", "expert")
        build.pools.append(replace(Pool(name="host"), place=Place.HOST))
        self.count: NamedCount = build.count(
            "routed",
            self.ep,
            experts=plan.experts,
            sent=plan.sent,
            maximum=None if plan.padded else plan.sent * plan.ranks,
        )
        self.trained: dict[str, BufferHandle] = {}
        self.sums: dict[str, BufferHandle] = {}
        self.alive: list[BufferHandle] = []
        self.prefix = ""
        self.batch = 0

    def write(self) -> Schedule:
        """Return setup and one step."""
        plan, model = self.plan, self.plan.model()
        for parameter in model.parameters:
            self.parameter(parameter)
        for self.batch in range(plan.micro_batches):
            self.micro_batch()
        self.update()
        parameters = tuple(
            LogicalParameter(name=each.name, elements=each.elements) for each in model.parameters
        )
        return self.build.schedule(
            Contract(
                parameters=parameters,
                loss_divisor=plan.replicas * plan.micro_batches,
                data_axes=("data", "expert"),
            )
        )

    def parameter(self, parameter: Parameter) -> None:
        """Declare a parameter, and the sum of its gradients."""
        name, build = parameter.name, self.build
        cut = "expert" if name.startswith("experts") and not self.plan.whole else None
        piece = Piece(parameter=name, start=0, size=parameter.elements)
        build.layout(Layout(name=name, pieces=(piece,), elements=parameter.elements, axis=cut))
        size = parameter.elements // (self.plan.ranks if cut else 1)
        self.trained[name] = build.buffer(
            name, size, kind=Kind.PARAMETER, layout=name, shard=cut, persistent=True
        )
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
        self.build.step.allocate(made)
        self.alive.append(made)
        return made

    def rows(self, name: str, layer: int, own: RowIndex, width: int = WIDE) -> BufferHandle:
        """Allocate a buffer of counted rows of this micro-batch."""
        made = self.build.counted(name, self.count, own, layer=layer, width=width)
        self.build.step.allocate(made, micro_batch=self.batch)
        self.alive.append(made)
        return made

    def run(
        self,
        unit: str,
        segment: int,
        action: Action,
        operands: Iterable[tuple[Role, View]],
    ) -> str:
        """Run a segment."""
        return self.build.step.compute(
            f"{self.prefix}/{unit}/{segment}/{action}",
            action,
            operands,
            unit=unit,
            segment=segment,
            micro_batch=self.batch,
        )

    def exchange(self, name: str, source: BufferHandle, target: BufferHandle) -> None:
        """Exchange rows over expert ranks; they stay where each rank has all experts."""
        step = self.build.step
        if self.plan.whole:
            step.copy(f"{self.prefix}/{name}", source.all, target.all)
        else:
            step.all_to_all(
                f"{self.prefix}/{name}", self.ep, source.all, target.all, stream=COMPUTE
            )

    def micro_batch(self) -> None:
        """Run forward and backward of a micro-batch."""
        step, self.prefix = self.build.step, f"mb{self.batch}"
        read = self.new("batch", HIDDEN, DType.INT64)
        step.compute(
            f"{self.prefix}/load", Action.LOAD, [(Role.OUTPUT, read.all)], micro_batch=self.batch
        )
        hidden = [self.new("h0", HIDDEN)]
        embed, head = self.trained["embed"], self.trained["head"]
        self.run(
            "embed",
            0,
            Action.FORWARD,
            [(Role.INPUT, read.all), (Role.PARAMETER, embed.all), (Role.OUTPUT, hidden[0].all)],
        )
        layers: list[_Layer] = []
        for layer in range(self.plan.layers):
            hidden.append(self.new(f"h{layer + 1}", HIDDEN))
            layers.append(_Layer(self, layer, hidden[-2], hidden[-1]))
            layers[-1].forward()
        loss, seed = self.new("loss", 1), self.new("seed", 1)
        last = hidden[-1].all
        self.run(
            "loss",
            0,
            Action.FORWARD,
            [(Role.INPUT, last), (Role.PARAMETER, head.all), (Role.OUTPUT, loss.all)],
        )
        step.fill(f"{self.prefix}/seed", seed.all, 1.0)
        slope, gradient = self.new("slope", HIDDEN), self.new("head/gradient", HIDDEN)
        self.run(
            "loss",
            0,
            Action.BACKWARD,
            [
                *((Role.INPUT, last), (Role.PARAMETER, head.all)),
                *((Role.OUTPUT_GRADIENT, seed.all), (Role.GRADIENT, gradient.all)),
                (Role.INPUT_GRADIENT, slope.all),
            ],
        )
        self.add("head", gradient)
        for each in reversed(layers):
            slope = each.backward(slope)
        gradient = self.new("embed/gradient", HIDDEN)
        self.run(
            "embed",
            0,
            Action.BACKWARD,
            [
                *((Role.INPUT, read.all), (Role.PARAMETER, embed.all)),
                *((Role.OUTPUT_GRADIENT, slope.all), (Role.GRADIENT, gradient.all)),
            ],
        )
        self.add("embed", gradient)
        step.free(*self.alive)
        self.alive.clear()

    def add(self, name: str, gradient: BufferHandle) -> None:
        """Add a gradient to its sum, as a part of the mean."""
        step, total = self.build.step, self.sums[name]
        if not self.batch:
            step.allocate(total)
        step.copy(
            f"{self.prefix}/{name}/add",
            gradient.all,
            total.all,
            accumulate=self.batch > 0,
            divisor=self.plan.replicas * self.plan.micro_batches,
        )

    def update(self) -> None:
        """Reduce and apply the gradients."""
        step = self.build.step
        for name, total in self.sums.items():
            own = name.startswith("experts") and not self.plan.whole
            group = self.edp if own else self.all
            step.all_reduce(f"{name}/reduce", group, total.all, stream=COMPUTE)
            operands = [(Role.PARAMETER, self.trained[name].all), (Role.GRADIENT, total.all)]
            step.compute(f"{name}/update", Action.UPDATE, operands, rule=SGD())
            step.free(total)


class _Layer:
    """A layer in a micro-batch."""

    def __init__(
        self, writer: _Writer, layer: int, before: BufferHandle, after: BufferHandle
    ) -> None:
        self.writer = writer
        self.layer = layer
        self.unit = f"layer{layer}"
        self.before, self.after = before, after
        self.router = writer.trained[f"router{layer}"]
        self.weights = writer.trained[f"experts{layer}"]
        self.there = SOURCE if writer.plan.whole else EXPERT

    def forward(self) -> None:
        """Route, exchange, run experts, exchange back, combine."""
        write, unit, plan = self.writer, self.unit, self.writer.plan
        self.probs = write.rows(f"{unit}/probs", self.layer, SOURCE, 1)
        chosen = write.new(f"{unit}/chosen", plan.experts, DType.INT64)
        self.map = write.new(f"{unit}/map", plan.sent, DType.INT64)
        write.run(
            unit,
            0,
            Action.FORWARD,
            [
                *((Role.INPUT, self.before.all), (Role.PARAMETER, self.router.all)),
                *((Role.OUTPUT, each.all) for each in (self.probs, chosen, self.map)),
            ],
        )
        if not (plan.whole or plan.padded):
            self.counts(chosen)
        rows = write.rows(f"{unit}/rows", self.layer, SOURCE)
        write.run(
            unit,
            1,
            Action.FORWARD,
            [
                *((Role.INPUT, self.before.all), (Role.INPUT, self.map.all)),
                (Role.OUTPUT, rows.all),
            ],
        )
        self.recv = write.rows(f"{unit}/recv", self.layer, self.there)
        self.got = write.rows(f"{unit}/got", self.layer, self.there, 1)
        write.exchange(f"{unit}/dispatch", rows, self.recv)
        write.exchange(f"{unit}/dispatch_probs", self.probs, self.got)
        out = write.rows(f"{unit}/out", self.layer, self.there)
        write.run(
            unit,
            2,
            Action.FORWARD,
            [
                *((Role.INPUT, self.recv.all), (Role.INPUT, self.got.all)),
                *((Role.PARAMETER, self.weights.all), (Role.OUTPUT, out.all)),
            ],
        )
        self.back = write.rows(f"{unit}/back", self.layer, SOURCE)
        write.exchange(f"{unit}/combine", out, self.back)
        write.run(
            unit,
            3,
            Action.FORWARD,
            [
                *((Role.INPUT, each.all) for each in (self.before, self.back, self.map)),
                (Role.OUTPUT, self.after.all),
            ],
        )

    def counts(self, chosen: BufferHandle) -> None:
        """Exchange the counts, and read them on the host."""
        write, unit, plan = self.writer, self.unit, self.writer.plan
        asked = write.new(f"{unit}/asked", plan.experts, DType.INT64)
        host = write.build.buffer(f"{unit}/host", plan.experts, dtype=DType.INT64, pool="host")
        write.build.step.allocate(host)
        write.alive.append(host)
        write.exchange(f"{unit}/counts", chosen, asked)
        copied = write.build.step.copy(f"{write.prefix}/{unit}/to_host", asked.all, host.all)
        write.build.step.read_counts(
            f"{write.prefix}/{unit}/read",
            copied,
            host.all,
            write.count.name,
            layer=self.layer,
            micro_batch=write.batch,
        )

    def backward(self, slope: BufferHandle) -> BufferHandle:
        """Return the gradient of the hidden state before the layer."""
        write, unit, layer = self.writer, self.unit, self.layer
        below = [write.new(f"{unit}/below{place}", HIDDEN) for place in range(3)]
        dback = write.rows(f"{unit}/dback", layer, SOURCE)
        write.run(
            unit,
            3,
            Action.BACKWARD,
            [
                *((Role.INPUT, each.all) for each in (self.before, self.back, self.map)),
                (Role.OUTPUT_GRADIENT, slope.all),
                *((Role.INPUT_GRADIENT, each.all) for each in (below[0], dback)),
            ],
        )
        dout = write.rows(f"{unit}/dout", layer, self.there)
        write.exchange(f"{unit}/combine_back", dback, dout)
        drecv = write.rows(f"{unit}/drecv", layer, self.there)
        dgot = write.rows(f"{unit}/dgot", layer, self.there, 1)
        gradient = write.new(f"{unit}/experts/gradient", self.weights.buffer.elements)
        write.run(
            unit,
            2,
            Action.BACKWARD,
            [
                *((Role.INPUT, self.recv.all), (Role.INPUT, self.got.all)),
                *((Role.PARAMETER, self.weights.all), (Role.OUTPUT_GRADIENT, dout.all)),
                (Role.GRADIENT, gradient.all),
                *((Role.INPUT_GRADIENT, each.all) for each in (drecv, dgot)),
            ],
        )
        write.add(f"experts{layer}", gradient)
        drows = write.rows(f"{unit}/drows", layer, SOURCE)
        dprobs = write.rows(f"{unit}/dprobs", layer, SOURCE, 1)
        write.exchange(f"{unit}/dispatch_back", drecv, drows)
        write.exchange(f"{unit}/probs_back", dgot, dprobs)
        write.run(
            unit,
            1,
            Action.BACKWARD,
            [
                *((Role.INPUT, each.all) for each in (self.before, self.map)),
                *((Role.OUTPUT_GRADIENT, drows.all), (Role.INPUT_GRADIENT, below[1].all)),
            ],
        )
        routed = write.new(f"{unit}/router/gradient", HIDDEN)
        write.run(
            unit,
            0,
            Action.BACKWARD,
            [
                *((Role.INPUT, self.before.all), (Role.PARAMETER, self.router.all)),
                *((Role.OUTPUT_GRADIENT, dprobs.all), (Role.GRADIENT, routed.all)),
                (Role.INPUT_GRADIENT, below[2].all),
            ],
        )
        write.add(f"router{layer}", routed)
        for place, each in enumerate(below[1:]):
            write.build.step.copy(
                f"{write.prefix}/{unit}/sum{place}", each.all, below[0].all, accumulate=True
            )
        return below[0]
