"""ZeRO-Offload's delayed parameter update: the host updates while the device runs the next step.

Ren et al. 2021, section 5.2: the gradients of a step are applied during forward and backward of the
next step, so that every step computes with parameters one update old. The first steps may update at
once. Host threads write updated parameters to memory that outlives the step. At the end of a step
these are copied to the device; only then does the next update overwrite them. The host holds the
gradients of two steps: those being applied and those that arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from zsim.schedule.operation import Action, FreeMode, Previous, Reduction
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import CPU, FROM_HOST, HOST_POOL, ScheduleWriter
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.names import WORLD
from zsim.zero.offloaded_optimizer import HostOptimizerStep
from zsim.zero.state import STEP, WARM_UP
from zsim.zero.updated_tensor import UpdatedTensor

AT_ONCE = "step/at_once"
"""Path of the updates of the first (warm-up) steps."""


def persist_landing(
    writer: ScheduleWriter, strategy: Strategy, bucket: Bucket, master: str
) -> None:
    """Allocate host memory for the updated parameters, and fill it with their initial values."""
    declare = bucket.buffer if strategy.zero.stage == 0 else bucket.shard_buffer
    name = declare(
        writer,
        "updated",
        strategy.train.precision.compute,
        Kind.COMMUNICATION,
        pool=HOST_POOL,
        home=CPU,
    )
    writer.copy(f"cast/{name}", master, writer.persist(name), stream=CPU)


def late_bytes(strategy: Strategy, buckets: Buckets) -> int:
    """Return the bytes of a rank's gradients that stay on the host until the next step's end."""
    elements = sum(
        bucket.padded if strategy.zero.stage == 0 else bucket.shard
        for bucket in buckets.all
        if not bucket.frozen
    )
    return elements * strategy.train.precision.compute.size_bytes


class DelayedOptimizerStep(HostOptimizerStep):
    """An update on the host that overlaps the next step."""

    def begin(self) -> None:
        """Prepare the update, with the gradients of the previous step still on the host."""
        super().begin()
        held = (self.writer.buffers[item.gradient.buffer] for item in self.tensors)
        self._late = sum(buffer.size_bytes for buffer in held)

    def measure(
        self,
        writer: ScheduleWriter,
        action: Action,
        target: str,
        reduction: Reduction,
        *,
        trained: Sequence[UpdatedTensor],
        group: str,
    ) -> None:
        """Measure gradients, once those of the previous step are applied."""
        super().measure(writer, action, target, reduction, trained=trained, group=group)
        self._count_back(writer)

    def _count_back(self, writer: ScheduleWriter) -> None:
        """Count the previous step's gradients as freed: the host has waited for the thread."""
        writer.count_late(HOST_POOL, -self._late)
        self._late = 0

    def write(self) -> None:
        """Measure gradients, copy the last update to the device, and start the next update."""
        writer, flag = self.writer, None
        writer.prefix = "step/update"
        if self.strategy.train.precision is Precision.FP16:
            flag = self._one_number("overflow")
            writer.allocate(flag)
            self.measure(
                writer, Action.FINITE, flag, Reduction.MAX, trained=self.tensors, group=WORLD
            )
        norm = self.norm(writer)
        if self.strategy.offload.warm_up_steps:
            self._unless(flag, "at_once", lambda side: self._while_warm(side, norm, at_once=True))
        for item in self.tensors:
            self._send_last(writer, item)
        self._count_back(writer)
        self._unless(flag, "delayed", lambda side: self._delayed(side, norm), self.skip_update)
        if norm is not None:
            writer.free(norm, uses=(writer.path(self.norm_ready),))
        if flag is not None:
            writer.free(flag, uses=(writer.path("overflow/reduce"),))
        if self.strategy.offload.warm_up_steps:
            writer.set_scalar(WARM_UP, WARM_UP, add=-1.0)

    def _unless(
        self,
        flag: str | None,
        name: str,
        go_on: Callable[[ScheduleWriter], object],
        skip: Callable[[ScheduleWriter], object] | None = None,
    ) -> None:
        """Write `go_on`, in a branch on the overflow `flag` if given; overflow runs `skip`."""
        writer = self.writer
        if flag is None:
            go_on(writer)
            return
        sides = writer.fork(f"step/skip/{name}"), writer.fork(writer.prefix)
        if skip is not None:
            skip(sides[0])
        go_on(sides[1])
        writer.branch(f"branch/{name}", flag, *sides, after=(writer.path("overflow/reduce"),))
        for side in sides:
            writer.join(side)

    def _while_warm(self, writer: ScheduleWriter, norm: str | None, *, at_once: bool) -> None:
        """Write the update in a branch on the warm-up counter.

        With `at_once`, the update runs in warm-up steps only, otherwise in later steps only.
        """
        updating, passing = writer.fork(writer.prefix), writer.fork(writer.prefix)
        if at_once:
            updating.prefix = AT_ONCE
            if self.tensors:  # an update in flight still holds its memory
                last = f"step/update/{self.tensors[-1].name}/cast"
                updating.host_wait("wait", Previous(last))
            updating.count_late(HOST_POOL, -self._late)
        self._update_all(updating, norm)
        if at_once:
            updating.count_late(HOST_POOL, self._late)
        if not at_once:
            self._free_gradients(updating, "step/update")
            passing.prefix = AT_ONCE
            self._free_gradients(passing, AT_ONCE)
        name = "warm_up/at_once" if at_once else "warm_up/delayed"
        sides = (updating, passing) if at_once else (passing, updating)
        writer.branch_on_scalar(name, WARM_UP, *sides)
        writer.join(passing)
        writer.join(updating)

    def _delayed(self, writer: ScheduleWriter, norm: str | None) -> None:
        if self.strategy.offload.warm_up_steps:
            self._while_warm(writer, norm, at_once=False)
        else:
            self._update_all(writer, norm)
            self._free_gradients(writer, "step/update")
        self.grow(writer)

    def _update_all(self, writer: ScheduleWriter, norm: str | None) -> None:
        writer.set_scalar(STEP, STEP, add=1.0)
        for item in self.tensors:
            landing = writer.all(f"{item.name}/updated")
            after = item.after
            if writer.prefix != AT_ONCE:
                after = (*after, f"step/update/{item.name}/upload")
            self.apply_one(writer, replace(item, parameter=landing, after=after), norm)

    def _send_last(self, writer: ScheduleWriter, item: UpdatedTensor) -> None:
        """Copy parameters of the last update to the device, once the thread has written them."""
        outer, writer.prefix = writer.prefix, f"{writer.prefix}/{item.name}"
        if self.strategy.offload.warm_up_steps:
            writer.host_wait("wait/at_once", f"{AT_ONCE}/{item.name}/cast")
        writer.host_wait("wait", Previous(writer.path("cast")))
        landing = f"{item.name}/updated"
        uploaded = writer.copy(
            "upload", landing, item.parameter, stream=FROM_HOST, after=self.after
        )
        self.updated(writer, item, uploaded)
        writer.prefix = outer

    def _free_gradients(self, writer: ScheduleWriter, path: str) -> None:
        """Free the gradients once the thread has read them, which is in the next step."""
        for item in self.tensors:
            held = writer.buffers[item.gradient.buffer]
            widens = held.dtype is not self.strategy.train.precision.optimizer
            last = f"{path}/{item.name}/{'widen' if widens else 'update'}"
            writer.free(held.name, mode=FreeMode.DEFERRED, uses=(last,))
