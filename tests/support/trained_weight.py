"""A weight that is trained on 4 x 2 ranks; how its gradient gets to the update is up to a test."""

from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Reduction, Role, View
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Schedule
from zsim.strategy.optimizer_rule import SGD

STREAM = "compute"
"""Everything is on one stream, so that nothing is out of order."""


class Trained:
    """A weight that is trained; what comes between backward and the update is up to the test."""

    def __init__(self) -> None:
        build = self.build = ScheduleBuilder.of("trained", data=4, tensor=2)
        for name in ("data", "tensor"):
            build.group(name, name)
        build.group("world", "data", "tensor")
        pieces = (Piece(parameter="w", start=0, size=8, copies=("tensor",)),)
        build.layout(Layout(name="cut", pieces=pieces, elements=8, axis="data"))
        self.step = build.step
        self.weight = self.state("weight", 8, Kind.PARAMETER)
        self.master = self.state("master", 2, Kind.MASTER, shard="data")
        self.whole = self.made("whole", 8, layout="cut")
        self.shard = self.made("shard", 2, layout="cut", shard="data")
        self.x = self.made("x", 2)
        self.y, self.seed = self.made("y", 1), self.made("seed", 1)
        self.micro_batches = 0

    def state(self, name: str, elements: int, kind: Kind, shard: str | None = None) -> BufferHandle:
        """An initialized buffer that outlives the step."""
        made = self.build.buffer(
            name, elements, kind=kind, layout="cut", shard=shard, persistent=True
        )
        self.build.setup.allocate(made)
        role = Role.MASTER if kind is Kind.MASTER else Role.PARAMETER
        self.build.setup.compute(f"{name}/initialize", Action.INITIALIZE, [(role, made.all)])
        return made

    def made(self, name: str, elements: int, **fields: str) -> BufferHandle:
        """A buffer of the step."""
        made = self.build.buffer(name, elements, **fields)  # type: ignore[arg-type]  # layout and shard
        self.step.allocate(made)
        return made

    def backward(self) -> None:
        """Load a micro-batch and make its gradient."""
        number, step = self.micro_batches, self.step
        self.micro_batches += 1
        step.compute(f"load{number}", Action.LOAD, [(Role.OUTPUT, self.x.all)], micro_batch=number)
        step.compute(
            f"forward{number}",
            Action.FORWARD,
            [
                (Role.INPUT, self.x.all),
                (Role.PARAMETER, self.weight.all),
                (Role.OUTPUT, self.y.all),
            ],
            unit="u",
            micro_batch=number,
        )
        step.fill(f"seed{number}", self.seed.all, 1.0)
        step.compute(
            f"backward{number}",
            Action.BACKWARD,
            [
                (Role.INPUT, self.x.all),
                (Role.PARAMETER, self.weight.all),
                (Role.OUTPUT_GRADIENT, self.seed.all),
                (Role.GRADIENT, self.whole.all),
            ],
            unit="u",
            micro_batch=number,
        )

    def scatter(self) -> None:
        """Give each rank its shard of the sum."""
        self.step.reduce_scatter("scatter", "data", self.whole.all, self.shard.all, stream=STREAM)

    def reduce(self, name: str, group: str, reduction: Reduction = Reduction.SUM) -> None:
        """Reduce the whole gradient."""
        self.step.all_reduce(name, group, self.whole.all, reduction=reduction, stream=STREAM)

    def update(self, gradient: View, *, gathers: bool = True) -> None:
        """Apply what should be the own shard of the gradient."""
        operands = [(Role.GRADIENT, gradient), (Role.MASTER, self.master.all)]
        self.step.compute("update", Action.UPDATE, operands, rule=SGD())
        own = self.weight.own("data", 2)
        self.step.copy("put", self.master.all, own)
        if gathers:
            self.step.all_gather("gather", "data", own, self.weight.all, stream=STREAM)

    def schedule(self, *, divisor: int = 1) -> Schedule:
        """Free what is left, and promise."""
        alive = [self.whole, self.shard, self.x, self.y, self.seed]
        self.step.free(*alive)
        parameters = (LogicalParameter(name="w", elements=8),)
        contract = Contract(parameters=parameters, loss_divisor=divisor, data_axes=("data",))
        return self.build.schedule(contract)
