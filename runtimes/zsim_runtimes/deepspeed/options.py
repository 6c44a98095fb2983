"""Options of DeepSpeed's `zero_optimization` (0.19), under their names."""

import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, Strict

from zsim.config_error import whole
from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag, Table
from zsim.strategy.offload import FileAccess, MemoryTier
from zsim.strategy.runtime_options import FloatFormat, Formats, RuntimeOptions

Elements = Annotated[int, Strict(), Field(ge=0, le=sys.maxsize), BeforeValidator(whole)]
"""A number of elements; Python's largest index means no limit."""


class OffloadDevice(StrEnum):
    """Devices of `offload_optimizer` and `offload_param`."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class ExpertLayer(StrEnum):
    """Layers that distribute experts over ranks."""

    AUTO_EP = "auto_ep"
    """`expert_parallel` of a ds_config.json, which replaces layers of Hugging Face models: grouped
    products, and exchanges of all routed rows."""
    NATIVE = "native"
    """`deepspeed.moe.layer.MoE`: experts in sequence, with rows up to a capacity."""


TIER = {
    OffloadDevice.NONE: MemoryTier.DEVICE,
    OffloadDevice.CPU: MemoryTier.HOST,
    OffloadDevice.NVME: MemoryTier.NVME,
}
"""Memory tier of each device."""


class OffloadOptimizer(Table):
    """`offload_optimizer` (DeepSpeed 0.19, `runtime/zero/offload_config.py`).

    Attributes:
        device: where masters and moments are kept; they are updated on the CPU.
        pin_memory: copies to and from gradients do not block the host.
        buffer_count: nvme: buffers for states, each as large as the largest sub-group.
        pipeline_read: nvme: read the next sub-group during an update.
        pipeline_write: nvme: write the previous sub-group during an update.
    """

    device: OffloadDevice = OffloadDevice.NONE
    pin_memory: Flag = True
    buffer_count: Count = 4
    pipeline_read: Flag = False
    pipeline_write: Flag = False

    @property
    def is_on(self) -> bool:
        """True if the optimizer is not on the device."""
        return self.device is not OffloadDevice.NONE

    @property
    def sets(self) -> int:
        """Number of sub-groups whose states are in buffers at once."""
        return 1 + self.pipeline_read + self.pipeline_write


class OffloadParam(Table):
    """`offload_param`, of stage 3 (DeepSpeed 0.19, `runtime/zero/offload_config.py`).

    Attributes:
        device: where a rank's shards of parameters are kept.
        buffer_count: nvme: slots for shards, each held while its parameter is whole.
        buffer_size: nvme: elements of a slot.
        max_in_cpu: nvme: elements of shards whose sub-groups stay in host memory.
    """

    device: OffloadDevice = OffloadDevice.NONE
    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Elements = 1_000_000_000

    @property
    def is_on(self) -> bool:
        """True if parameters are not on the device."""
        return self.device is not OffloadDevice.NONE


class Aio(Table):
    """`aio`: file handles (DeepSpeed 0.19, `csrc/aio`, `runtime/swap_tensor/aio_config.py`).

    Attributes:
        block_size: bytes of one request to the drives.
        queue_depth: requests that a thread has in flight.
        intra_op_parallelism: threads of a handle, each with an equal part of an operation;
            `thread_count` before 0.16.
        overlap_events: issue another request as soon as one completes; if False, wait until all
            requests in flight complete.
    """

    block_size: Count = 1 << 20
    queue_depth: Count = 8
    intra_op_parallelism: Count = 1
    overlap_events: Flag = True


class DeepSpeed(RuntimeOptions):
    """Options of stages 0 to 3, in elements, not bytes. The stage is set in the strategy.

    Stage 0 reads `communication_data_type` and `cpu_checkpointing` only.

    Attributes:
        reduce_bucket_size: gradients are reduced in buckets of at most this number of elements.
        overlap_comm: reduce on a side stream; None for DeepSpeed's default: only in stage 3.
        communication_data_type: dtype in which gradients are reduced; None for the model's.
        sub_group_size: stage 3: elements of a rank's shards that are updated together.
        stage3_prefetch_bucket_size: stage 3: elements that one fetch gathers ahead.
        stage3_max_live_parameters: stage 3: with this many gathered elements, nothing is
            fetched ahead.
        stage3_max_reuse_distance: stage 3: parameters that are used again within this distance are
            kept.
        stage3_param_persistence_threshold: stage 3: smaller parameters are never freed in a step.
        zero_hpz_partition_size: stage 3: ranks that share the secondary shards (ZeRO++ hpZ).
        migration_stream: stages 1 and 2 with `offload_optimizer`: gradients are cast and copied to
            the host on a separate stream. Not an option of DeepSpeed: the branch of ZeRO-Offload's
            first author did so (jren73/DeepSpeed at e4bd86a, `copy_grads_in_partition`).
        delay_param_update: stage 2 with `migration_stream`: a step computes with parameters one
            update old. The CPU updates before the next forward, and the backward of the next step
            copies each parameter to the device once its gradient is copied. Not an option of
            DeepSpeed: the same branch has it (`step_with_param_delay`).
        cpu_checkpointing: with full checkpointing, inputs of checkpointed blocks are in host memory
            until recompute (`activation_checkpointing.cpu_checkpointing`).
        checkpoint_stream: with `cpu_checkpointing`: copies run on a separate stream. Not an option
            of DeepSpeed, which does so since August 2026 (858e91ee, after 0.19.5) unless
            `partition_activations` is on; before, the host waited for each copy.
        expert_layer: with expert ranks, the layer that has them: auto_ep or native.
        offload_optimizer: where masters and moments are kept.
        offload_param: stage 3: where shards of parameters are kept.
        aio: stage 3: how files are read and written.
    """

    stages = (0, 1, 2, 3)
    has_replicas = False
    takes_frozen = True
    trains_narrow = True
    takes_quantized = True
    keeps_quantized = True
    has_experts = True
    shards_experts = False  # experts in parts need a tensor axis, which has no own tokens here
    checkpoint_option = "cpu_checkpointing"

    min_aio_bytes: ClassVar[int] = 1 << 20
    """Smaller tensors are never written to a file: `MIN_AIO_BYTES`."""
    aio_alignment: ClassVar[int] = 256
    """Each I/O thread handles a multiple of this number of fp32 elements: `AIO_ALIGNED_BYTES`."""

    reduce_bucket_size: Count = 500_000_000
    overlap_comm: Flag | None = None
    communication_data_type: FloatFormat | None = None
    sub_group_size: Count = 1_000_000_000
    stage3_prefetch_bucket_size: Elements = 50_000_000
    stage3_max_live_parameters: Elements = 1_000_000_000
    stage3_max_reuse_distance: Elements = 1_000_000_000
    stage3_param_persistence_threshold: Elements = 100_000
    zero_hpz_partition_size: Count = 1
    migration_stream: Flag = False
    delay_param_update: Flag = False
    cpu_checkpointing: Flag = False
    checkpoint_stream: Flag = False
    expert_layer: ExpertLayer = ExpertLayer.AUTO_EP
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    aio: Aio = Aio()

    @property
    def weighs_at_source(self) -> bool:
        """True: `combine_from_routed` of AutoEP, `_sparse_decode` of native experts."""
        return True

    @property
    def delays_updates(self) -> bool:
        """True with `delay_param_update`."""
        return self.delay_param_update

    @property
    def loops_experts(self) -> bool:
        """True of native experts: `Experts.forward` of deepspeed/moe/experts.py."""
        return self.expert_layer is ExpertLayer.NATIVE

    @property
    def least_file_bytes(self) -> int:
        """Bytes of the smallest tensor that is written to a file: at least a block."""
        is_default = self.aio.block_size == Aio().block_size
        return self.min_aio_bytes if is_default else max(self.min_aio_bytes, self.aio.block_size)

    @property
    def file_alignment(self) -> int:
        """File sizes are multiples of this number of fp32 elements."""
        return self.aio_alignment * self.aio.intra_op_parallelism

    @property
    def file_access(self) -> FileAccess:
        """How files are read and written."""
        return FileAccess(
            block_bytes=self.aio.block_size,
            queue_depth=self.aio.queue_depth,
            threads=self.aio.intra_op_parallelism,
            waves=not self.aio.overlap_events,
        )

    def tiers(self, *, stage: int) -> dict[str, MemoryTier]:
        """Return the tiers of the optimizer and of parameters."""
        del stage
        said = {
            "offload_optimizer.device": TIER[self.offload_optimizer.device],
            "offload_param.device": TIER[self.offload_param.device],
        }
        return {name: tier for name, tier in said.items() if tier is not MemoryTier.DEVICE}

    def refusals(self, *, stage: int, moments: int) -> Iterator[tuple[str, object, str]]:
        """Yield invalid options: offload devices of another stage, and too few buffers."""
        optimizer, parameters = self.offload_optimizer, self.offload_param
        if self.migration_stream and (stage == 3 or not optimizer.is_on):
            why = "is for stages 1 and 2 with offload_optimizer.device = cpu"
            yield "migration_stream", True, why
        if self.delay_param_update and (stage != 2 or not self.migration_stream):
            yield "delay_param_update", None, "true needs stage 2 and migration_stream = true"
        if self.checkpoint_stream and not self.cpu_checkpointing:
            yield "checkpoint_stream", None, "true needs cpu_checkpointing = true"
        if stage == 0 and optimizer.is_on:
            why = "is for stages 1 to 3; stage 0 keeps states on the device"
            yield "offload_optimizer.device", optimizer.device, why
        elif stage < 3:
            if optimizer.device is OffloadDevice.NVME:
                why = f"is for stage 3; in stage {stage} DeepSpeed keeps states in host memory: cpu"
                yield "offload_optimizer.device", optimizer.device, why
            if parameters.is_on:
                why = f"is for stage 3, in stage {stage} every rank holds all parameters"
                yield "offload_param.device", parameters.device, why
        elif parameters.device is OffloadDevice.NVME and not optimizer.is_on:
            why = "needs an optimizer that is not on the device: offload_optimizer.device"
            yield "offload_param.device", parameters.device, why
        elif parameters.device is OffloadDevice.NVME and self.zero_hpz_partition_size > 1:
            why = f"is not emulated with zero_hpz_partition_size = {self.zero_hpz_partition_size}"
            yield "offload_param.device", parameters.device, why
        needed = optimizer.sets * (2 + moments)
        if optimizer.device is OffloadDevice.NVME and optimizer.buffer_count < needed:
            kept = f"a parameter, a gradient and {moments} moments"
            why = f"must be at least {needed}: {optimizer.sets} sub-groups at once with {kept} each"
            yield "offload_optimizer.buffer_count", optimizer.buffer_count, why

    def files(self, elements: int, dtype: DType) -> bool:
        """Return True if optimizer states of `elements` elements are kept in files."""
        # as is_swappable_tensor in runtime/swap_tensor/optimizer_utils.py
        on_nvme = self.offload_optimizer.device is OffloadDevice.NVME
        return on_nvme and elements * dtype.size_bytes >= self.least_file_bytes

    def inner(self, *, stage: int, data: int) -> tuple[str, int | None]:
        """Return the option and the number of ranks of secondary shards; None without them."""
        del data
        size = self.zero_hpz_partition_size
        return "deepspeed.zero_hpz_partition_size", size if size > 1 and stage == 3 else None

    def alignment(self, *, stage: int, data: int) -> int:
        """Return the `nccl_start_alignment_factor` of `stage_1_and_2`: 4 bytes of fp16."""
        del data
        return 2 if 0 < stage < 3 else 1

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return dtypes: gradients accumulate in that of parameters.

        DeepSpeed 0.16 and 0.19, `DeepSpeedEngine.get_data_types` without `grad_accum_dtype`.
        """
        return Formats(
            compute=compute,
            reduction=self.communication_data_type or compute,
            whole=compute,
            reduced=compute,
            optimizer=optimizer,
        )

    def smaller_buckets(self, elements: int) -> str | None:
        """Return the option that limits the bucket size to `elements`, if it is larger."""
        return f"reduce_bucket_size={elements}" if self.reduce_bucket_size > elements else None

    @classmethod
    def offloads(cls, *, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return the optimizer on the host (ZeRO-Offload), then parameters as well."""
        optimizer, parameters = "offload_optimizer.device=cpu", "offload_param.device=cpu"
        if not stage:
            return ()
        return ((optimizer,),) if stage < 3 else ((optimizer,), (optimizer, parameters))
