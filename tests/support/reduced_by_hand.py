"""All parameters as one tensor, cut over ranks anywhere, reduced in buckets: each keeps its own.

The flow is that of DeepSpeed's stages 1 and 2: a bucket is divided and summed on every rank, the
slices that the rank owns are copied out of it, and after the step all shards are gathered in place.
"""

from dataclasses import dataclass

import torch
from sharded_net import MAXIMUM, ROWS, UNITS, WIDTH, Flow, Net, batch, plain_loop
from torch import distributed

from zsim.dtype import DType
from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Role, View
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Schedule
from zsim.strategy.optimizer_rule import SGD, Adam, ClipNorm
from zsim_torch.train import Option, train

SIZES = {
    f"{unit}.{name}": size
    for unit in UNITS
    for name, size in (("weight", WIDTH * WIDTH), ("bias", WIDTH))
}
UNIT = WIDTH * WIDTH + WIDTH
RULE = SGD(learning_rate=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """On how many ranks, in which format computed; buckets are as large as a unit."""

    ranks: int
    parameter: DType = DType.FP32
    micro_batches: int = 2
    steps: int = 3
    poison: bool = False
    adam: bool = False

    @property
    def rule(self) -> SGD | Adam:
        """What updates."""
        return Adam(learning_rate=0.01, epsilon=1e-5) if self.adam else RULE

    @property
    def padded(self) -> int:
        """Elements of all parameters, padded to a multiple of the ranks."""
        return -(-len(UNITS) * UNIT // self.ranks) * self.ranks

    @property
    def shard(self) -> int:
        """Elements that a rank owns."""
        return self.padded // self.ranks


class Reduced:
    """The schedule, a phase at a time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        build = self.build = ScheduleBuilder.of("reduced by hand", data=plan.ranks)
        self.data = build.group("data", "data")
        pieces: list[Piece] = []
        for name, size in SIZES.items():
            pieces.append(Piece(parameter=name, start=pieces[-1].end if pieces else 0, size=size))
        build.layout(Layout(name="all", pieces=tuple(pieces), elements=plan.padded, axis="data"))
        self.parameters = self._state("parameters", plan.padded, plan.parameter, Kind.PARAMETER)
        self.master = self._state("master", plan.shard, DType.FP32, Kind.MASTER, shard=True)
        self.own = self._state("own", plan.shard, DType.FP32, Kind.GRADIENT, shard=True)
        self.moments = [
            self._state(f"moment{each}", plan.shard, DType.FP32, Kind.MOMENT, shard=True)
            for each in range(plan.rule.moments)
        ]
        if plan.adam:
            build.scalar("step", 0.0)
        self.squares = build.buffer("squares", 1)

    def _state(
        self, name: str, elements: int, dtype: DType, kind: Kind, *, shard: bool = False
    ) -> BufferHandle:
        return self.build.buffer(
            name,
            elements,
            dtype=dtype,
            kind=kind,
            layout="all",
            shard="data" if shard else None,
            persistent=name != "own",
        )

    def _flowing(self, name: str, elements: int, kind: Kind = Kind.WORKSPACE) -> BufferHandle:
        return self.build.buffer(
            name, elements, dtype=self.plan.parameter, kind=kind, produced=True
        )

    def setup(self) -> None:
        """Parameters everywhere, masters in shards."""
        setup = self.build.setup
        setup.allocate(self.parameters, self.master, *self.moments)
        setup.compute("parameters", Action.INITIALIZE, [(Role.PARAMETER, self.parameters.all)])
        setup.compute("master", Action.INITIALIZE, [(Role.MASTER, self.master.all)])
        for moment in self.moments:
            setup.fill(f"clear/{moment.name}", moment.all, 0.0)

    def pieces(self, role: Role, buffer: BufferHandle, start: int) -> list[tuple[Role, View]]:
        """Both parameters of a unit, from `start` of a buffer on."""
        middle = start + WIDTH * WIDTH
        return [(role, buffer[start:middle]), (role, buffer[middle : start + UNIT])]

    def micro_batch(self, number: int) -> None:
        """Forward, backward, and each bucket reduced as soon as it is full."""
        step, build, at = self.build.step, self.build, f"mb{number}"
        given = build.buffer(f"{at}/batch", ROWS * WIDTH, dtype=DType.INT64, produced=True)
        hidden = self._flowing(f"{at}/hidden", ROWS * WIDTH)
        loss = self._flowing(f"{at}/loss", 1)
        slope = self._flowing(f"{at}/slope", ROWS * WIDTH)
        seed = build.buffer(f"{at}/seed", 1, dtype=self.plan.parameter)
        saved = [self._flowing(f"{at}/{unit}/saved", ROWS * WIDTH, Kind.SAVED) for unit in UNITS]
        step.allocate(given)
        step.compute(f"{at}/load", Action.LOAD, [(Role.OUTPUT, given.all)], micro_batch=number)
        for index, (source, output) in enumerate(((given, hidden), (hidden, loss))):
            step.allocate(output, saved[index])
            operands = [
                (Role.INPUT, source.all),
                *self.pieces(Role.PARAMETER, self.parameters, index * UNIT),
                (Role.OUTPUT, output.all),
                (Role.SAVED, saved[index].all),
            ]
            self._run(Action.FORWARD, number, index, operands)
        step.free(loss)
        step.allocate(seed, slope)
        step.fill(f"{at}/seed", seed.all, 1.0)
        self.backward(number, 1, hidden, [saved[1], seed], slope)
        self.backward(number, 0, given, [saved[0], slope], None)

    def _run(
        self, action: Action, number: int, index: int, operands: list[tuple[Role, View]]
    ) -> None:
        name = f"mb{number}/{UNITS[index]}/{action}"
        self.build.step.compute(name, action, operands, unit=UNITS[index], micro_batch=number)

    def backward(
        self,
        number: int,
        index: int,
        source: BufferHandle,
        given: list[BufferHandle],
        slope: BufferHandle | None,
    ) -> None:
        """Gradients of a unit, and its bucket; `given` was saved, and came from above."""
        step, name = self.build.step, f"mb{number}/{UNITS[index]}"
        gradient = self._flowing(f"{name}/gradient", UNIT, Kind.GRADIENT)
        operands = [
            (Role.INPUT, source.all),
            (Role.SAVED, given[0].all),
            *self.pieces(Role.PARAMETER, self.parameters, index * UNIT),
            (Role.OUTPUT_GRADIENT, given[1].all),
            *self.pieces(Role.GRADIENT, gradient, 0),
        ]
        if slope is not None:
            operands.append((Role.INPUT_GRADIENT, slope.all))
        step.allocate(gradient)
        self._run(Action.BACKWARD, number, index, operands)
        step.free(source, *given)
        self.reduce(name, gradient, index, first=number == 0)

    def reduce(self, name: str, gradient: BufferHandle, index: int, *, first: bool) -> None:
        """Divide, sum on every rank, keep the slices that are the rank's own."""
        step, plan = self.build.step, self.plan
        bucket = self.build.buffer(f"{name}/bucket", UNIT, kind=Kind.COMMUNICATION)
        step.allocate(bucket)
        divided = step.copy(
            f"{name}/divide",
            gradient.all,
            bucket.all,
            divisor=plan.ranks * plan.micro_batches,
        )
        step.free(gradient)
        summed = step.all_reduce(f"{name}/sum", self.data, bucket.all, after=[divided])
        step.copy(
            f"{name}/slices",
            bucket.window("all", UNIT, index * UNIT, origin=0),
            self.own.window("all", UNIT, index * UNIT),
            accumulate=not first,
            after=[summed],
        )
        step.free(bucket, uses=[summed])

    def update(self) -> None:
        """Clip, update masters, cast them into place, gather all shards in place."""
        step, plan = self.build.step, self.plan
        step.allocate(self.squares)
        norm = step.compute(
            "norm",
            Action.NORM,
            [(Role.GRADIENT, self.own.all), (Role.OUTPUT, self.squares.all)],
        )
        summed = step.all_reduce("norm/sum", self.data, self.squares.all, after=[norm])
        step.compute(
            "clip",
            Action.CLIP,
            [(Role.INPUT, self.squares.all), (Role.GRADIENT, self.own.all)],
            rule=ClipNorm(maximum=MAXIMUM),
            after=[summed],
        )
        step.free(self.squares, uses=[summed])
        if plan.adam:
            step.set_scalar("step", "step", add=1.0)
        step.compute(
            "update",
            Action.UPDATE,
            [
                (Role.MASTER, self.master.all),
                (Role.GRADIENT, self.own.all),
                *((Role.MOMENT, moment.all) for moment in self.moments),
            ],
            rule=plan.rule,
            scalars=["step"] if plan.adam else [],
        )
        step.free(self.own)
        self.gather(self.master)

    def gather(self, updated: BufferHandle, *after: str) -> None:
        """Cast what was updated into its place, gather all shards in place."""
        step, slot = self.build.step, self.parameters.own("data", self.plan.shard)
        cast = step.copy("cast", updated.all, slot, after=after)
        gathered = step.all_gather("gather", self.data, slot, self.parameters.all, after=[cast])
        step.host_wait("gathered", gathered)

    def write(self) -> Schedule:
        """Everything in order."""
        plan, step = self.plan, self.build.step
        self.setup()
        step.allocate(self.own)
        step.fill("clear", self.own.all, 0.0)
        for number in range(plan.micro_batches):
            self.micro_batch(number)
        self.update()
        return self.build.schedule(
            Contract(
                parameters=tuple(
                    LogicalParameter(name=name, elements=size, rule=plan.rule)
                    for name, size in SIZES.items()
                ),
                loss_divisor=plan.ranks * plan.micro_batches,
            )
        )


def batches(plan: Plan, rank: int) -> list[torch.Tensor]:
    """Every micro-batch of a rank."""
    count = plan.steps * plan.micro_batches
    return [batch(number, rank) for number in range(count)]


def all_by_slices(plans: list[Plan]) -> list[tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """Plan after plan on this rank: parameters, and what was observed."""
    found: list[tuple[dict[str, torch.Tensor], dict[str, float]]] = []
    for plan in plans:
        trained = train(
            Net(),
            UNITS,
            Reduced(plan).write(),
            batches(plan, distributed.get_rank()),
            steps=plan.steps,
            option=Option(observe=True, write_back=False, poison=plan.poison),
        )
        found.append((trained.full_parameters(), dict(trained.trace.observed)))
    return found


def in_one_process(plan: Plan) -> dict[str, torch.Tensor]:
    """The same in a plain loop."""
    by_rank = [batches(plan, rank) for rank in range(plan.ranks)]
    size = plan.micro_batches
    steps = [
        [each for mine in by_rank for each in mine[step * size : (step + 1) * size]]
        for step in range(plan.steps)
    ]
    return plain_loop(Flow(parameter=plan.parameter, clip=True, adam=plan.adam), steps)
