"""Optimizer states in host memory or in files, updated by a thread of the host, written by hand.

The training is that of `reduced_by_hand`; what is offloaded changes no bit of it. The flow is that
of DeepSpeed's pipelined swapper: group by group a handle reads states into slots of pinned memory,
a thread updates them, another handle writes them back, and what was updated goes to the device.
"""

from dataclasses import dataclass

from reduced_by_hand import Plan, Reduced
from sharded_net import MAXIMUM

from zsim.schedule.buffer_handle import BufferHandle
from zsim.schedule.operation import Action, Previous, Role
from zsim.schedule.schedule import Kind, Place, Pool
from zsim.strategy.optimizer_rule import ClipNorm

THREAD, READS, WRITES, OUT, BACK = "adam", "reads", "writes", "to_host", "to_device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded(Plan):
    """In how many groups a shard is updated; with `files` states are on NVMe, in so many slots."""

    groups: int = 2
    files: bool = False
    slots: int = 2
    adam: bool = True

    @property
    def size(self) -> int:
        """Elements of a group."""
        assert self.shard % self.groups == 0
        return self.shard // self.groups


class OffloadedStates(Reduced):
    """The schedule: `Reduced` until the shard of the gradient is whole."""

    def __init__(self, plan: Offloaded) -> None:
        super().__init__(plan)
        self.offload = plan
        build = self.build
        count = 1 + len(self.moments)
        build.host_thread(THREAD)
        for stream in (OUT, BACK, *((READS, WRITES) if plan.files else ())):
            build.stream(stream)
        build.pools.append(Pool(name="host", place=Place.HOST))
        for gone in (self.master, *self.moments):
            del build.buffers[gone.name]
            build.persistent.remove(gone.name)
        if plan.files:
            size = plan.size * 4
            capacity = plan.slots * count * size
            build.pools.append(Pool(name="files", place=Place.NVME))
            build.pools.append(
                Pool(name="slots", place=Place.HOST, slot_bytes=size, capacity_bytes=capacity)
            )
        place, home = ("files", WRITES) if plan.files else ("host", THREAD)
        self.states = [
            self._at(each.name, plan.shard, each.buffer.kind, place, home, persistent=True)
            for each in (self.master, *self.moments)
        ]
        self.gradient = self._at("host/gradient", plan.shard, Kind.GRADIENT, "host", OUT)
        self.squares = build.buffer("squares", 1, home=BACK)
        self.squares_there = build.buffer("host/squares", 1, pool="host", home=THREAD)
        self.updated = build.buffer("updated", plan.shard, home=BACK)
        self.slots: dict[int, list[BufferHandle]] = {}

    def _at(
        self,
        name: str,
        elements: int,
        kind: Kind,
        pool: str,
        home: str,
        *,
        persistent: bool = False,
    ) -> BufferHandle:
        return self.build.buffer(
            name,
            elements,
            kind=kind,
            pool=pool,
            home=home,
            layout="all",
            shard="data",
            persistent=persistent,
        )

    def setup(self) -> None:
        """Write states by way of host memory, if they are in files."""
        setup = self.build.setup
        setup.allocate(self.parameters, *self.states)
        setup.compute("parameters", Action.INITIALIZE, [(Role.PARAMETER, self.parameters.all)])
        for state in self.states:
            target, is_master = state, state.buffer.kind is Kind.MASTER
            if self.offload.files:
                kind = state.buffer.kind
                target = self._at(f"first/{state.name}", self.plan.shard, kind, "host", THREAD)
                setup.allocate(target)
            if is_master:
                made = setup.compute(
                    state.name, Action.INITIALIZE, [(Role.MASTER, target.all)], stream=THREAD
                )
            else:
                made = setup.fill(state.name, target.all, 0.0, stream=THREAD)
            if self.offload.files:
                name = f"write/{state.name}"
                written = setup.write_file(name, target.all, state.all, stream=WRITES, after=[made])
                setup.free(target, uses=[written])

    def update(self) -> None:
        """Copy the gradient out, clip and update it there, copy what was updated back."""
        step = self.build.step
        step.allocate(self.gradient)
        out = step.copy(
            "out", self.own.all, self.gradient.all, stream=OUT, after=[self._latest("compute")]
        )
        step.free(self.own, uses=[out])
        clipped = self.clip(out)
        step.set_scalar("step", "step", add=1.0)
        step.allocate(self.updated)
        groups = range(self.offload.groups)
        ahead = self.offload.slots - 1
        backs: list[str] = []
        for number in groups:
            for other in groups[number + ahead if number else 0 : number + ahead + 1]:
                self.fetch(other)
            backs.append(self.group(number, clipped))
        step.free(self.gradient, uses=[f"step/update{number}" for number in groups])
        self.gather(self.updated, backs[-1])
        step.free(self.updated, uses=["step/cast"])

    def _latest(self, stream: str) -> str:
        """Return the last operation on a stream so far."""
        return next(
            each.id
            for each in reversed(self.build.step.operations)
            if getattr(each, "stream", None) == stream
        )

    def clip(self, out: str) -> str:
        """Sum squares on the host, over ranks on the device, and clip on the host."""
        step, squares = self.build.step, self.squares_there
        step.allocate(squares, self.squares)
        norm = step.compute(
            "norm",
            Action.NORM,
            [(Role.GRADIENT, self.gradient.all), (Role.OUTPUT, squares.all)],
            stream=THREAD,
            after=[out],
        )
        step.host_wait("normed", norm)
        there = step.copy("norm/there", squares.all, self.squares.all, stream=BACK, after=[norm])
        summed = step.all_reduce("norm/sum", self.data, self.squares.all, after=[there])
        back = step.copy("norm/back", self.squares.all, squares.all, stream=OUT, after=[summed])
        step.free(self.squares, uses=[there, summed, back])
        clipped = step.compute(
            "clip",
            Action.CLIP,
            [(Role.INPUT, squares.all), (Role.GRADIENT, self.gradient.all)],
            rule=ClipNorm(maximum=MAXIMUM),
            stream=THREAD,
            after=[back],
        )
        step.free(squares, uses=[there, back])
        return clipped

    def fetch(self, number: int) -> None:
        """Read the states of a group into slots."""
        if not self.offload.files:
            return
        step = self.build.step
        self.slots[number] = [
            self.build.buffer(
                f"slot{number % self.offload.slots}/{state.name}",
                self.offload.size,
                kind=state.buffer.kind,
                pool="slots",
                home=READS,
            )
            for state in self.states
        ]
        step.allocate(*self.slots[number])
        for state, slot in zip(self.states, self.slots[number], strict=True):
            step.read(
                f"read{number}/{state.name}",
                state[self.window(number)],
                slot.all,
                stream=READS,
                after=[Previous(f"step/write{number}/{state.name}")],
            )

    def window(self, number: int) -> slice:
        """Return what a group is of a shard."""
        return slice(number * self.offload.size, (number + 1) * self.offload.size)

    def group(self, number: int, clipped: str) -> str:
        """Update one group and write it back; returns the copy to the device."""
        step, window = self.build.step, self.window(number)
        slots = self.slots.get(number, [])
        views = [slot.all for slot in slots] or [state[window] for state in self.states]
        reads = [f"step/read{number}/{state.name}" for state in self.states if slots]
        updated = step.compute(
            f"update{number}",
            Action.UPDATE,
            [
                *zip((Role.MASTER, Role.MOMENT, Role.MOMENT), views, strict=True),
                (Role.GRADIENT, self.gradient[window]),
            ],
            rule=self.plan.rule,
            scalars=["step"],
            stream=THREAD,
            after=[clipped, *reads],
        )
        writes: list[str] = []
        for state, slot in zip(self.states, slots, strict=False):
            name = f"write{number}/{state.name}"
            writes.append(
                step.write_file(name, slot.all, state[window], stream=WRITES, after=[updated])
            )
        step.host_wait(f"updated{number}", updated)
        back = step.copy(
            f"back{number}", views[0], self.updated[window], stream=BACK, after=[updated]
        )
        for slot in slots:
            step.free(slot, uses=[updated, back, *writes])
        return back
