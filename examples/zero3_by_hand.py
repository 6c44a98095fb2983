"""ZeRO stage 3 of a three-layer model, written by hand: every operation stands here once.

    python examples/zero3_by_hand.py

Each layer has 6 parameters that are cut in shards over 4 ranks, with 2 elements of padding. A layer
is gathered, used and freed, forward and backward; its gradient is reduced to shards; SGD updates
the shards.
"""

from zsim.dtype import DType
from zsim.schedule.builder import COMMUNICATION, BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Role
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Schedule
from zsim.strategy.optimizer_rule import SGD

RANKS, ELEMENTS, PADDED, WIDTH = 4, 6, 8, 5
SHARD = PADDED // RANKS
LAYERS = ("layer0", "layer1", "loss")


class Layer:
    """The buffers of one layer; `source` is the layer whose output it reads, if not the batch."""

    def __init__(self, build: ScheduleBuilder, name: str, source: "Layer | None") -> None:
        self.name, self.source = name, source
        pieces = (Piece(parameter=f"{name}.weight", start=0, size=ELEMENTS),)
        build.layout(Layout(name=name, pieces=pieces, elements=PADDED, axis="data"))
        self.shard = build.buffer(
            f"{name}/shard", SHARD, kind=Kind.PARAMETER, layout=name, shard="data", persistent=True
        )
        self.own = build.buffer(
            f"{name}/own", SHARD, kind=Kind.GRADIENT, home=COMMUNICATION, layout=name, shard="data"
        )
        self.weight = build.buffer(
            f"{name}/weight", PADDED, kind=Kind.COMMUNICATION, home=COMMUNICATION, layout=name
        )
        self.staging = build.buffer(f"{name}/staging", PADDED, kind=Kind.COMMUNICATION)
        self.gradient = build.buffer(f"{name}/gradient", ELEMENTS, produced=True)
        self.saved = build.buffer(f"{name}/saved", WIDTH, kind=Kind.SAVED, produced=True)
        self.is_loss = name == LAYERS[-1]
        self.output = build.buffer(f"{name}/output", 1 if self.is_loss else WIDTH, produced=True)
        self.slope = (
            build.buffer("seed", 1)
            if self.is_loss
            else build.buffer(f"{name}/slope", WIDTH, produced=True)
        )


class Zero3:
    """The schedule, a phase at a time."""

    def __init__(self) -> None:
        self.build = ScheduleBuilder.of("zero3 by hand", data=RANKS)
        self.data = self.build.group("data", "data")
        self.batch = self.build.buffer("batch", WIDTH, dtype=DType.INT64, produced=True)
        self.layers: list[Layer] = []
        for name in LAYERS:
            source = self.layers[-1] if self.layers else None
            self.layers.append(Layer(self.build, name, source))

    def setup(self) -> None:
        """Each rank initializes its shards."""
        setup = self.build.setup
        for layer in self.layers:
            setup.allocate(layer.shard)
            operands = [(Role.PARAMETER, layer.shard.all)]
            setup.compute(f"{layer.name}/initialize", Action.INITIALIZE, operands)

    def load(self) -> None:
        """Load a batch."""
        self.build.step.allocate(self.batch)
        self.build.step.compute("load", Action.LOAD, [(Role.OUTPUT, self.batch.all)])

    def forward(self, layer: Layer) -> None:
        """Gather, compute, free."""
        step = self.build.step
        step.allocate(layer.weight)
        gathered = step.all_gather(
            f"{layer.name}/gather", self.data, layer.shard.all, layer.weight.all
        )
        step.allocate(layer.output, layer.saved)
        operands = [
            (Role.INPUT, self.read_by(layer).all),
            (Role.PARAMETER, layer.weight[:ELEMENTS]),
            (Role.OUTPUT, layer.output.all),
            (Role.SAVED, layer.saved.all),
        ]
        done = step.compute(
            f"{layer.name}/forward", Action.FORWARD, operands, unit=layer.name, after=[gathered]
        )
        step.free(layer.weight, uses=[done])

    def seed(self, loss: Layer) -> None:
        """Write the gradient of the loss with respect to itself, which is one."""
        step = self.build.step
        step.free(loss.output)
        step.allocate(loss.slope)
        step.fill("seed", loss.slope.all, 1.0)

    def backward(self, layer: Layer) -> None:
        """Gather again, compute gradients, free what is no longer needed."""
        step = self.build.step
        step.allocate(layer.weight)
        gathered = step.all_gather(
            f"{layer.name}/gather_again", self.data, layer.shard.all, layer.weight.all
        )
        operands = [
            (Role.INPUT, self.read_by(layer).all),
            (Role.SAVED, layer.saved.all),
            (Role.PARAMETER, layer.weight[:ELEMENTS]),
            (Role.OUTPUT_GRADIENT, layer.slope.all),
            (Role.GRADIENT, layer.gradient.all),
        ]
        if layer.source:
            step.allocate(layer.source.slope)
            operands.append((Role.INPUT_GRADIENT, layer.source.slope.all))
        step.allocate(layer.gradient)
        done = step.compute(
            f"{layer.name}/backward", Action.BACKWARD, operands, unit=layer.name, after=[gathered]
        )
        step.free(layer.weight, uses=[done])
        step.free(self.read_by(layer), layer.saved, layer.slope)

    def reduce(self, layer: Layer) -> None:
        """Average over ranks; each keeps its shard."""
        step = self.build.step
        step.allocate(layer.staging)
        step.copy(
            f"{layer.name}/stage", layer.gradient.all, layer.staging[:ELEMENTS], divisor=RANKS
        )
        padded = step.fill(f"{layer.name}/pad", layer.staging[ELEMENTS:], 0.0)
        step.free(layer.gradient)
        step.allocate(layer.own)
        reduced = step.reduce_scatter(
            f"{layer.name}/reduce", self.data, layer.staging.all, layer.own.all, after=[padded]
        )
        step.free(layer.staging, uses=[reduced])

    def update(self, layer: Layer) -> None:
        """Change the shard by its gradient."""
        step = self.build.step
        operands = [(Role.PARAMETER, layer.shard.all), (Role.GRADIENT, layer.own.all)]
        reduced = step.path(f"{layer.name}/reduce")
        updated = step.compute(
            f"{layer.name}/update", Action.UPDATE, operands, rule=SGD(), after=[reduced]
        )
        step.free(layer.own, uses=[updated])

    def read_by(self, layer: Layer) -> BufferHandle:
        """Return what `layer` reads: the output of the layer before it, or the batch."""
        return layer.source.output if layer.source else self.batch


def write() -> Schedule:
    """Return the schedule of setup and one step."""
    hand = Zero3()
    hand.setup()
    hand.load()
    for layer in hand.layers:
        hand.forward(layer)
    hand.seed(hand.layers[-1])
    for layer in reversed(hand.layers):
        hand.backward(layer)
        hand.reduce(layer)
    for layer in hand.layers:
        hand.update(layer)
    parameters = tuple(
        LogicalParameter(name=f"{name}.weight", elements=ELEMENTS) for name in LAYERS
    )
    return hand.build.schedule(Contract(parameters=parameters, loss_divisor=RANKS))


if __name__ == "__main__":
    schedule = write()
    (program,) = schedule.programs
    print(f"{schedule.name}: {len(program.step)} operations for each of {schedule.mesh.size} ranks")
