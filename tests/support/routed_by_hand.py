"""A layer of experts written by hand: counts, tokens there and back, each way an all-to-all."""

from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.schedule.builder import COMMUNICATION, BufferHandle, ScheduleBuilder
from zsim.schedule.counts import RowIndex
from zsim.schedule.schedule import Place, Pool, Schedule

WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Sizes of the schedule: expert ranks, data ranks, experts, rows that a rank sends."""

    ranks: int = 2
    data: int = 1
    experts: int = 4
    sent: int = 12
    maximum: int = 24
    layers: int = 2
    micro_batches: int = 2

    def schedule(self) -> Schedule:
        """Return the schedule."""
        return _Layers(self).write()


class _Layers:
    """The schedule, a phase at a time."""

    def __init__(self, plan: Routed) -> None:
        self.plan = plan
        self.build = ScheduleBuilder.of("routed", data=plan.data, expert=plan.ranks)
        self.group = self.build.group("ep", "expert")
        self.build.pools.append(replace(Pool(name="host"), place=Place.HOST))
        self.build.stream("d2h")
        self.count = self.build.count(
            "routed", self.group, experts=plan.experts, sent=plan.sent, maximum=plan.maximum
        )

    def rows(self, name: str, layer: int, own: RowIndex, home: str) -> BufferHandle:
        """Declare a buffer of tokens."""
        return self.build.counted(
            f"layer{layer}/{name}", self.count, own, layer=layer, width=WIDTH, home=home
        )

    def write(self) -> Schedule:
        """Return the schedule of a step: all layers of a micro-batch, then of the next one."""
        experts = self.plan.experts
        buffers: list[dict[str, BufferHandle]] = []
        for layer in range(self.plan.layers):
            name = f"layer{layer}"
            buffers.append(
                {
                    "chosen": self.build.buffer(f"{name}/chosen", experts, dtype=DType.INT64),
                    "asked": self.build.buffer(
                        f"{name}/asked", experts, dtype=DType.INT64, home=COMMUNICATION
                    ),
                    "host": self.build.buffer(
                        f"{name}/host", experts, dtype=DType.INT64, pool="host", home="d2h"
                    ),
                    "send": self.rows("send", layer, RowIndex.SOURCE, "compute"),
                    "recv": self.rows("recv", layer, RowIndex.EXPERT, COMMUNICATION),
                    "out": self.rows("out", layer, RowIndex.EXPERT, "compute"),
                    "back": self.rows("back", layer, RowIndex.SOURCE, COMMUNICATION),
                }
            )
        for micro_batch in range(self.plan.micro_batches):
            for layer, own in enumerate(buffers):
                self.layer(f"mb{micro_batch}/layer{layer}", layer, micro_batch, own)
        return self.build.schedule()

    def layer(self, name: str, layer: int, micro_batch: int, own: dict[str, BufferHandle]) -> None:
        """Exchange counts, then tokens there and back."""
        step = self.build.step
        step.allocate(own["chosen"])
        chosen = step.fill(f"{name}/route", own["chosen"].all, 3.0)
        step.allocate(own["asked"], own["host"])
        asked = step.all_to_all(
            f"{name}/counts", self.group, own["chosen"].all, own["asked"].all, after=[chosen]
        )
        copied = step.copy(
            f"{name}/to_host", own["asked"].all, own["host"].all, stream="d2h", after=[asked]
        )
        step.read_counts(
            f"{name}/read",
            copied,
            own["host"].all,
            self.count.name,
            layer=layer,
            micro_batch=micro_batch,
        )
        step.free(own["chosen"], uses=[asked])
        step.free(own["asked"], uses=[copied])
        step.free(own["host"])
        step.allocate(own["send"], own["recv"], micro_batch=micro_batch)
        permuted = step.fill(f"{name}/permute", own["send"].all, 1.0)
        moved = step.all_to_all(
            f"{name}/dispatch", self.group, own["send"].all, own["recv"].all, after=[permuted]
        )
        step.free(own["send"], uses=[moved])
        step.allocate(own["out"], own["back"], micro_batch=micro_batch)
        computed = step.copy(f"{name}/experts", own["recv"].all, own["out"].all, after=[moved])
        step.free(own["recv"], uses=[computed])
        combined = step.all_to_all(
            f"{name}/combine", self.group, own["out"].all, own["back"].all, after=[computed]
        )
        step.free(own["out"], uses=[combined])
        step.host_wait(f"{name}/wait", combined)
        step.free(own["back"])
