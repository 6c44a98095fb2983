"""Twin-Flow: a share of the updates stays on the device.

ZeRO-Offload++ (DeepSpeed, `blogs/deepspeed-offloadpp`) keeps the states of some sub-groups on the
GPU, and updates them there; DeepSpeed's `ratio` is the share updated on the host. As in DeepSpeed's
stage 3 (0.19, `DeepSpeedZeroOptimizer_Stage3._configure_offloading`), the first sub-groups stay on
the device: their gradients are reduced last and need not go to the host. Here sub-groups are
buckets, and the device updates its buckets while host threads update the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from zsim.dtype import DType
from zsim.model.model import ModelError
from zsim.schedule.operation import Action, Reduction
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import CPU, FROM_HOST, HOST_POOL, POOL, ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.strategy.zero_knobs import FusedBuffers
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.offloaded_optimizer import HostOptimizerStep
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.updated_tensor import UpdatedTensor


def kept_on_device(buckets: Buckets, strategy: Strategy) -> frozenset[int]:
    """Return the buckets whose states stay on the device: the first, up to `device_share`.

    Raises:
        ModelError: the first bucket alone exceeds the share.
    """
    share = strategy.offload.device_share
    if not share:
        return frozenset()
    total = sum(bucket.padded for bucket in buckets.trained)
    found: list[int] = []
    held, most = 0, Fraction(str(share)) * total  # exact: 0.29 * 100 < 29 in floats
    for bucket in buckets.trained:
        held += bucket.padded
        if held > most:
            break
        found.append(bucket.index)
    if not found and buckets.trained:
        raise ModelError(_too_little(buckets.trained[0], total, strategy))
    return frozenset(found)


def _too_little(first: Bucket, total: int, strategy: Strategy) -> str:
    """Return the message that the share is smaller than the first bucket, and the least share."""
    given = f"offload.device_share: {strategy.offload.device_share:g}"
    scale = 10 ** len(str(100 * total // first.padded))  # gives three or four digits
    least = Fraction(-(-first.padded * scale // total), scale)
    if len(first.layout.pieces) == 1:
        remedy = ""
    elif strategy.zero.fused_buffers is FusedBuffers.MODEL:
        remedy = "; zero.fused_buffers = constant makes several"
    else:
        remedy = "; a smaller zero.bucket_elements may make that less"
    if least >= 1:
        why = f"the first bucket is {first.padded / total:.3g} of all that is trained"
        return f"{given} keeps nothing on the device: {why}{remedy}"
    why = f"must be 0 or at least {float(least):g}, what the first bucket is of all that is trained"
    return f"{given} {why}{remedy}"


class TwinFlowStep(HostOptimizerStep):
    """An update of some tensors on the device, of the others on the host."""

    number_home = COMPUTE

    def begin(self) -> None:
        """Split the tensors by the memory of their gradients: device or host."""
        super().begin()
        contiguous = self.strategy.zero.contiguous
        self.tensors = [
            replace(item, keeps_gradient=contiguous) if self._stays(item) else item
            for item in self.tensors
        ]
        own = [item for item in self.tensors if self._stays(item)]
        self._device = OptimizerStep(
            self.writer,
            self.strategy,
            own,
            after=self.after,
            updated=self.updated,
            stream=self.stream,
        )
        self._device_norm: str | None = None

    def _stays(self, item: UpdatedTensor) -> bool:
        return self.writer.buffers[item.gradient.buffer].pool == POOL

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
        """Measure gradients on host and device, add both numbers on the device, reduce the sum.

        Partial results are fp64, so that their sum is rounded only once.
        """
        landing = self._on_host(writer, target)
        if action is Action.NORM:
            writer.allocate(landing)
        host = self._wide(writer, f"{target}/of_host", HOST_POOL)
        away = [item for item in trained if not self._stays(item)]
        measured = self.measured(writer, action, target, host, trained=away)
        total = self._wide(writer, f"{target}/total", POOL)
        self._device.measured(
            writer, action, f"{target}/device", total, trained=self._device.tensors
        )
        part = self._wide(writer, f"{target}/part", POOL)
        writer.host_wait(f"{target}/wait", measured)
        up = writer.copy(f"{target}/upload", host, part, stream=self.to_device, after=(measured,))
        writer.free(host, uses=(up,))
        writer.copy(f"{target}/add", part, total, accumulate=True, stream=COMPUTE, after=(up,))
        summed = writer.copy(f"{target}/narrow", total, target, stream=COMPUTE)
        writer.free(part, uses=(summed,))
        writer.free(total)
        path = f"{target}/reduce"
        reduced = writer.all_reduce(
            path, group, target, reduction=reduction, stream=self.stream, after=(summed,)
        )
        if action is Action.NORM:
            out = self.from_device
            writer.copy(f"{target}/download", target, landing, stream=out, after=(reduced,))

    def _wide(self, writer: ScheduleWriter, name: str, pool: str) -> str:
        home = CPU if pool == HOST_POOL else FROM_HOST if name.endswith("part") else COMPUTE
        number = writer.buffer(name, 1, DType.FP64, Kind.WORKSPACE, pool=pool, home=home)
        writer.allocate(number)
        return number

    def measured_by(self, item: UpdatedTensor, /) -> str:
        """Return the operation that tests the gradient of a tensor for overflow."""
        on_device = "step/update/overflow/device/measure"
        return on_device if self._stays(item) else super().measured_by(item)

    def norm(self, writer: ScheduleWriter) -> str | None:
        """Return the buffer of the squared norm on the host; keep the device's as well."""
        self._device_norm = OptimizerStep.norm(self, writer)
        return None if self._device_norm is None else self._on_host(writer, self._device_norm)

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a tensor on the device or on the host, where its states are kept."""
        if self._stays(item):
            self._device.update_one(writer, item, self._device_norm)
        else:
            super().update_one(writer, item, norm)

    def completed(self, writer: ScheduleWriter) -> None:
        """Send the parameters of the host's last tensor, and free the device's norm."""
        super().completed(writer)
        if self._device_norm is not None:
            uses = (writer.path("norm/reduce"), writer.path("norm/download"))
            writer.free(self._device_norm, uses=uses)
