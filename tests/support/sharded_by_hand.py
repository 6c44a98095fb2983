"""Two units, each padded parameter by parameter and cut over the data axis, trained by hand.

The flow is that of PyTorch's fully_shard: the own shard is cast into its slot of a buffer, which is
gathered in place; parameters are copied out of it; gradients are copied into the input of a
reduce-scatter, which is followed by an all-reduce over replicas.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from sharded_net import MAXIMUM, ROWS, UNITS, WIDTH, Flow, Net, batch
from torch import distributed

from zsim.dtype import DType
from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, HostWait, Operand, Previous, Reduction, Role, View
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Schedule
from zsim.strategy.optimizer_rule import ClipNorm
from zsim_torch.feed import place_of_data
from zsim_torch.train import Option, Trained, train


@dataclass
class Unit:
    """The buffers of a unit, and the layouts of its parameters."""

    name: str
    flow: Flow
    build: ScheduleBuilder
    buffers: dict[str, BufferHandle] = field(default_factory=dict[str, BufferHandle])

    def __post_init__(self) -> None:
        build, flow, name = self.build, self.flow, self.name
        ranks = flow.data
        rows = self.rows = -(-WIDTH // ranks) * ranks
        sizes = {f"{name}.weight": WIDTH * WIDTH, f"{name}.bias": WIDTH}
        padded = (rows * WIDTH, rows)
        starts = (0, *accumulate(padded))
        copies = ("replicate",) if flow.copies else ()
        pieces = tuple(
            Piece(parameter=parameter, start=start, size=size, copies=copies)
            for (parameter, size), start in zip(sizes.items(), starts, strict=False)
        )
        elements = starts[-1]
        self.shard = elements // ranks
        build.layout(
            Layout(name=name, pieces=pieces, elements=elements, axis="data", blocks=starts[:-1])
        )
        tight = (
            pieces[0],
            Piece(parameter=f"{name}.bias", start=WIDTH * WIDTH, size=WIDTH),
        )
        self.tight = WIDTH * WIDTH + WIDTH
        build.layout(Layout(name=f"{name}/tight", pieces=tight, elements=self.tight))
        self.own = self.make("own", self.shard, flow.master, Kind.PARAMETER, "compute", shard=True)
        if flow.adam:
            self.first = self.make("first", self.shard, flow.master, Kind.MOMENT, shard=True)
            self.second = self.make("second", self.shard, flow.master, Kind.MOMENT, shard=True)
        self.gathered = self.make("gathered", elements, flow.parameter, home="copy")
        if flow.secondary:
            self.part = elements // (flow.inner or 1)
            self.kept = build.buffer(f"{name}/kept", self.part, dtype=flow.parameter)
        self.whole = self.make("whole", self.tight, flow.parameter, Kind.PARAMETER, tight=True)
        self.gradient = build.buffer(
            f"{name}/gradient",
            self.tight,
            dtype=flow.parameter,
            kind=Kind.GRADIENT,
            produced=True,
            layout=f"{name}/tight",
        )
        self.input = self.make("input", elements, flow.reduced)
        self.reduced = self.make(
            "reduced", self.shard, flow.reduced, Kind.GRADIENT, "reduce", shard=True
        )
        is_loss = name == UNITS[-1]
        flows = 1 if is_loss else ROWS * WIDTH
        saved, output = ROWS * WIDTH, flows
        self.saved = self.flowing("saved", saved, Kind.SAVED)
        self.output = self.flowing("output", output, Kind.WORKSPACE)
        self.slope = (
            build.buffer("seed", 1, dtype=flow.parameter)
            if is_loss
            else self.flowing("slope", output, Kind.WORKSPACE)
        )

    def make(
        self,
        name: str,
        elements: int,
        dtype: DType,
        kind: Kind = Kind.COMMUNICATION,
        home: str = "compute",
        *,
        shard: bool = False,
        tight: bool = False,
    ) -> BufferHandle:
        """A buffer that holds the unit's layout: whole, the shard, or tight."""
        return self.build.buffer(
            f"{self.name}/{name}",
            elements,
            dtype=dtype,
            kind=kind,
            home=home,
            layout=f"{self.name}/tight" if tight else self.name,
            shard="data" if shard else None,
            persistent=name in ("own", "first", "second"),
        )

    def flowing(self, name: str, elements: int, kind: Kind) -> BufferHandle:
        """What autograd makes."""
        return self.build.buffer(
            f"{self.name}/{name}", elements, dtype=self.flow.parameter, kind=kind, produced=True
        )

    def pieces(self, role: Role, buffer: BufferHandle) -> list[tuple[Role, View]]:
        """Both parameters in a tight buffer."""
        return [(role, buffer[: WIDTH * WIDTH]), (role, buffer[WIDTH * WIDTH :])]

    def window(self, buffer: str, parameter: int) -> View:
        """What a shard has of the weight (0) or of the bias (1), padding included."""
        start, size = (0, self.rows * WIDTH) if parameter == 0 else (self.rows * WIDTH, self.rows)
        return View(buffer=buffer, start=start, size=size, layout=self.name)

    @property
    def trained_by(self) -> View:
        """Where the reduced gradient is."""
        if self.flow.in_place:
            return self.input.own("data", self.shard)
        return self.reduced.all


class ByHand:
    """The schedule, a phase at a time."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        build = self.build = ScheduleBuilder("sharded by hand", flow.mesh())
        for stream in ("copy", "gather", "reduce", "replicas"):
            build.stream(stream)
        axes = ("data",) if flow.inner is None else ("outer", "inner")
        self.data = build.group("data", *axes)
        self.scatter = build.group("scatter", *axes)
        self.replicas = build.group("replicas", "replicate")
        self.norm = build.group("norm", *(("replicate",) if flow.copies else ()), *axes)
        self.near = build.group("near", axes[-1])
        if flow.adam:
            build.scalar("step", 0.0)
        self.batch = build.buffer("batch", ROWS * WIDTH, dtype=DType.INT64, produced=True)
        self.squares = build.buffer("squares", 1, dtype=flow.reduced)
        self.units = [Unit(name, flow, build) for name in UNITS]
        self.axes = axes

    def setup(self) -> None:
        """Each rank initializes its shards."""
        setup = self.build.setup
        for unit in self.units:
            setup.allocate(unit.own)
            operands = [(Role.PARAMETER, unit.own.all)]
            setup.compute(f"{unit.name}/initialize", Action.INITIALIZE, operands)
            if self.flow.adam:
                setup.allocate(unit.first, unit.second)
                setup.fill(f"{unit.name}/first", unit.first.all, 0.0)
                setup.fill(f"{unit.name}/second", unit.second.all, 0.0)

    def gather(self, unit: Unit, when: str) -> str:
        """Copy in, gather in place, copy out."""
        step, name, flow = self.build.step, f"{unit.name}/{when}", self.flow
        again = flow.secondary and when == "backward"
        step.allocate(unit.gathered)
        source, before = unit.own, f"step/{unit.name}/update"
        slot = unit.gathered.own("data", unit.shard)
        if again:
            source, before = unit.kept, f"step/{unit.name}/forward/keep"
            slot = unit.gathered.own("inner", unit.part)
        copied = step.copy(
            f"{name}/in",
            source.all,
            slot,
            stream="copy",
            after=[before if again else Previous(before)],
        )
        if again:
            step.free(unit.kept, uses=[copied])
        gathered = step.all_gather(
            f"{name}/gather",
            self.near if again else self.data,
            slot,
            unit.gathered.all,
            stream="gather",
            after=[copied],
        )
        uses = [gathered]
        if flow.secondary and not again:
            step.allocate(unit.kept)
            part = unit.gathered.own("inner", unit.part)
            uses.append(step.copy(f"{name}/keep", part, unit.kept.all, after=[gathered]))
        step.allocate(unit.whole)
        out = step.copy(
            f"{name}/out", unit.gathered.all, unit.whole.all, by_parameter=True, after=[gathered]
        )
        step.free(unit.gathered, mode=flow.free, uses=[*uses, out])
        return out

    def forward(self, unit: Unit, source: BufferHandle) -> None:
        """Gather, compute, free."""
        self.gather(unit, "forward")
        step = self.build.step
        step.allocate(unit.output, unit.saved)
        operands = [
            (Role.INPUT, source.all),
            *unit.pieces(Role.PARAMETER, unit.whole),
            (Role.OUTPUT, unit.output.all),
            (Role.SAVED, unit.saved.all),
        ]
        step.compute(f"{unit.name}/forward", Action.FORWARD, operands, unit=unit.name)
        step.free(unit.whole)

    def backward(self, unit: Unit, source: BufferHandle, slope: BufferHandle | None) -> None:
        """Gather again, compute gradients, free what is no longer needed."""
        step = self.build.step
        self.gather(unit, "backward")
        operands = [
            (Role.INPUT, source.all),
            (Role.SAVED, unit.saved.all),
            *unit.pieces(Role.PARAMETER, unit.whole),
            (Role.OUTPUT_GRADIENT, unit.slope.all),
            *unit.pieces(Role.GRADIENT, unit.gradient),
        ]
        if slope is not None:
            step.allocate(slope)
            operands.append((Role.INPUT_GRADIENT, slope.all))
        step.allocate(unit.gradient)
        step.compute(f"{unit.name}/backward", Action.BACKWARD, operands, unit=unit.name)
        step.free(unit.whole, source, unit.saved, unit.slope)

    def copy_in(self, unit: Unit) -> str:
        """The gradients, into what is reduced."""
        step, flow = self.build.step, self.flow
        step.allocate(unit.input)
        if not flow.in_place:
            step.allocate(unit.reduced)
        copied = step.copy(
            f"{unit.name}/reduce/in",
            unit.gradient.all,
            unit.input.all,
            by_parameter=True,
            divisor=flow.readers // flow.data if flow.average else flow.readers,
        )
        step.free(unit.gradient)
        return copied

    def reduce(self, units: list[Unit], copied: list[str]) -> str:
        """Reduce to shards, all units as one, and sum over replicas."""
        step, flow, last = self.build.step, self.flow, copied[-1]
        for unit in units:
            last = step.reduce_scatter(
                f"{unit.name}/reduce",
                self.scatter,
                unit.input.all,
                unit.trained_by,
                reduction=Reduction.AVERAGE if flow.average else Reduction.SUM,
                stream="reduce",
                after=[] if flow.together else copied,
            )
        if flow.together:
            last = step.together("reduce", len(units), after=copied)
        uses = [last]
        if flow.readers > flow.data:
            for unit in units:
                last = step.all_reduce(
                    f"{unit.name}/replicas",
                    self.replicas,
                    unit.trained_by,
                    stream="replicas",
                    after=uses[:1],
                )
        if not flow.in_place:
            for unit in units:
                step.free(unit.input, mode=flow.free, uses=uses)
        return last

    def clip(self, reduced: list[str]) -> list[str]:
        """Scale all gradients by their norm, which every replica has alone."""
        step = self.build.step
        gradients = [Operand(role=Role.GRADIENT, view=unit.trained_by) for unit in self.units]
        step.allocate(self.squares)
        number = Operand(role=Role.OUTPUT, view=self.squares.all)
        norm = step.compute("norm", Action.NORM, [*gradients, number], after=reduced)
        summed = step.all_reduce(
            "norm/sum", self.norm, self.squares.all, stream="reduce", after=[norm]
        )
        clipped = step.compute(
            "clip",
            Action.CLIP,
            [Operand(role=Role.INPUT, view=self.squares.all), *gradients],
            rule=ClipNorm(maximum=MAXIMUM),
            after=[summed],
        )
        step.free(self.squares, uses=[summed])
        return [clipped]

    def update(self, unit: Unit, after: list[str]) -> None:
        """Change the shard by its gradient."""
        step, flow = self.build.step, self.flow
        operands = [(Role.PARAMETER, unit.own.all), (Role.GRADIENT, unit.trained_by)]
        if flow.adam:
            operands += [(Role.MOMENT, unit.first.all), (Role.MOMENT, unit.second.all)]
        parts = [("update", operands)]
        if flow.windows:
            parts = [
                (name, [(role, unit.window(view.buffer, which)) for role, view in operands])
                for name, which in (("update_weight", 0), ("update", 1))
            ]
        *_, updated = [
            step.compute(
                f"{unit.name}/{name}",
                Action.UPDATE,
                views,
                rule=flow.rule,
                scalars=["step"] if flow.adam else [],
                after=after,
            )
            for name, views in parts
        ]
        held = unit.input if flow.in_place else unit.reduced
        step.add(HostWait(id=f"step/{unit.name}/updated", operation=updated))
        step.free(held, mode=flow.free, uses=[*after, updated])

    def write(self) -> Schedule:
        """Everything in order."""
        self.setup()
        step, (body, loss) = self.build.step, self.units
        if self.flow.adam:
            step.set_scalar("count", "step", add=1.0)
        step.allocate(self.batch)
        step.compute("load", Action.LOAD, [(Role.OUTPUT, self.batch.all)])
        self.forward(body, self.batch)
        self.forward(loss, body.output)
        step.free(loss.output)
        step.allocate(loss.slope)
        step.fill("seed", loss.slope.all, 1.0)
        self.backward(loss, body.output, body.slope)
        copied = [self.copy_in(loss)]
        reduced = [] if self.flow.together else [self.reduce([loss], copied)]
        self.backward(body, self.batch, None)
        copied.append(self.copy_in(body))
        late = [loss, body] if self.flow.together else [body]
        reduced.append(self.reduce(late, copied[-len(late) :]))
        after = self.clip(reduced) if self.flow.clip else reduced
        for unit in self.units:
            self.update(unit, after)
        sizes = {"weight": WIDTH * WIDTH, "bias": WIDTH}
        return self.build.schedule(
            Contract(
                parameters=tuple(
                    LogicalParameter(name=f"{unit}.{name}", elements=size)
                    for unit in UNITS
                    for name, size in sizes.items()
                ),
                loss_divisor=self.flow.readers,
                data_axes=self.axes if self.flow.copies else ("replicate", *self.axes),
            )
        )


def by_hand(flow: Flow) -> tuple[dict[str, torch.Tensor], Trained]:
    """Train on this rank of a process group."""
    schedule = ByHand(flow).write()
    reader, readers = place_of_data(schedule, distributed.get_rank())
    assert readers == flow.readers
    trained = train(
        Net(),
        UNITS,
        schedule,
        [batch(step, reader) for step in range(flow.steps)],
        steps=flow.steps,
        option=Option(observe=True, write_back=False, poison=flow.poison),
    )
    return trained.full_parameters(), trained


OfRank = list[tuple[dict[str, torch.Tensor], dict[str, float], list[tuple[str, int]]]]
"""Flow after flow: parameters, what was observed, and the book of a rank."""


def all_by_hand(flows: list[Flow]) -> OfRank:
    """What this rank has after each flow."""
    found: OfRank = []
    for flow in flows:
        parameters, trained = by_hand(flow)
        book = [(entry.buffer, entry.change_bytes) for entry in trained.trace.ranks[0].book]
        found.append((parameters, dict(trained.trace.observed), book))
    return found
