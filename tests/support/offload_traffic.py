"""Bytes of offloaded training, by tier and by link.

An independent check of schedules, from numbers alone: `shard` is the number of parameters that a
rank owns, `micro_batches` the number of gradient accumulations before an update, `gradient_bytes`
the width of the format in which gradients are accumulated. Sources: ZeRO-Offload (Ren et al. 2021,
arXiv 2101.06840), sections 3 to 5; ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857),
sections 3 to 6; DeepSpeed at edaa722, `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`runtime/swap_tensor`; PyTorch 2.13.0, `torch/distributed/fsdp/_fully_shard`. DeepSpeed keeps
gradients that are too small for its files in host memory, so bytes on NVMe are upper bounds there.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from zsim.closed_form.offload_formulas import ADAM_STATES, ADAM_TRAFFIC, FULL, HALF

UNSCALE_TRAFFIC, CAST_TRAFFIC = 8, 6
"""Host memory traffic of an in-place pass over fp32, and of a cast from fp32 to 16 bits."""


class OffloadScheme(StrEnum):
    """Schedules of offloaded training with bytes from publications or source code."""

    PAPER = "paper"
    """The minimum with fp32 states next to the update: 16 bits out and back, cast on the host."""
    PAPER_DELAYED = "paper_delayed"
    """`PAPER` with updates one step late: two steps' gradients and new parameters are held."""
    DEEPSPEED_1_2 = "deepspeed_1_2"
    """DeepSpeed's stages 1 and 2 with the optimizer on the CPU."""
    DEEPSPEED_3 = "deepspeed_3"
    """DeepSpeed's stage 3 with the optimizer on the CPU."""
    DEEPSPEED_3_PARAMETERS = "deepspeed_3_parameters"
    """DeepSpeed's stage 3 with optimizer and parameters on the CPU."""
    DEEPSPEED_3_NVME = "deepspeed_3_nvme"
    """DeepSpeed's stage 3 with parameters on the CPU, the optimizer on NVMe."""
    DEEPSPEED_3_ALL_NVME = "deepspeed_3_all_nvme"
    """DeepSpeed's stage 3 with parameters and optimizer on NVMe."""
    FSDP2 = "fsdp2"
    """FSDP2 with CPUOffloadPolicy and fp32 storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Bytes of model states that persist on a rank, by tier, without buffers and windows."""

    gpu: int = 0
    pinned: int = 0
    pageable: int = 0
    nvme: int = 0

    @property
    def host(self) -> int:
        """Bytes of host memory, pinned and pageable."""
        return self.pinned + self.pageable


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTraffic:
    """Bytes that a rank moves in an optimizer step, by link; `host_memory` is of CPU kernels."""

    from_gpu: int = 0
    to_gpu: int = 0
    nvme_read: int = 0
    nvme_written: int = 0
    host_memory: int = 0


def tier_bytes(
    scheme: OffloadScheme,
    *,
    parameters: int,
    ranks: int,
    micro_batches: int = 1,
    gradient_bytes: int = HALF,
) -> TierBytes:
    """Return one rank's bytes of model states by tier, for `parameters` sharded over `ranks`."""
    shard = parameters // ranks
    sums = gradient_bytes * shard
    match scheme:
        case OffloadScheme.PAPER:  # 16-bit gradients and fp32 states: with parameters 16 bytes
            return TierBytes(gpu=HALF * parameters, pinned=HALF * shard, pageable=12 * shard)
        case OffloadScheme.PAPER_DELAYED:
            pinned, pageable = 3 * HALF * shard, ADAM_STATES * shard
            return TierBytes(gpu=HALF * parameters, pinned=pinned, pageable=pageable)
        case OffloadScheme.DEEPSPEED_1_2:
            again = HALF * shard if micro_batches > 1 else 0
            pinned = (FULL + FULL + HALF) * shard + again
            return TierBytes(gpu=HALF * parameters, pinned=pinned, pageable=2 * FULL * shard)
        case OffloadScheme.DEEPSPEED_3:
            pinned, pageable = FULL * shard + sums, ADAM_STATES * shard
            return TierBytes(gpu=HALF * shard, pinned=pinned, pageable=pageable)
        case OffloadScheme.DEEPSPEED_3_PARAMETERS:
            pinned = (FULL + HALF) * shard + sums
            return TierBytes(pinned=pinned, pageable=ADAM_STATES * shard)
        case OffloadScheme.DEEPSPEED_3_NVME:
            return TierBytes(pinned=HALF * shard + sums, nvme=(ADAM_STATES + FULL) * shard)
        case OffloadScheme.DEEPSPEED_3_ALL_NVME:
            return TierBytes(pinned=sums, nvme=(ADAM_STATES + FULL + HALF) * shard)
        case OffloadScheme.FSDP2:  # fp32 parameters are pinned; gradients and moments need not be
            return TierBytes(pinned=FULL * shard, pageable=3 * FULL * shard)


def traffic(
    scheme: OffloadScheme, *, shard: int, micro_batches: int = 1, gradient_bytes: int = HALF
) -> OffloadTraffic:
    """Return the bytes that a rank with `shard` parameters moves in a step.

    Parameters stay whole through forward and backward: recomputation uses the gather of backward.
    """
    times = micro_batches
    kernels = (ADAM_TRAFFIC + UNSCALE_TRAFFIC + CAST_TRAFFIC) * shard
    sums = times * gradient_bytes * shard
    gathers = 2 * times * HALF * shard
    stage_3 = OffloadTraffic(
        from_gpu=FULL * shard + sums, to_gpu=sums + HALF * shard, host_memory=kernels
    )
    match scheme:
        case OffloadScheme.PAPER | OffloadScheme.PAPER_DELAYED:
            memory = (ADAM_TRAFFIC + HALF) * shard
            return OffloadTraffic(from_gpu=HALF * shard, to_gpu=HALF * shard, host_memory=memory)
        case OffloadScheme.DEEPSPEED_1_2:
            again = HALF * shard
            return OffloadTraffic(
                from_gpu=FULL * shard + (times * again if times > 1 else 0),
                to_gpu=HALF * shard + (times - 1) * again,
                host_memory=kernels,
            )
        case OffloadScheme.DEEPSPEED_3:
            return stage_3
        case OffloadScheme.DEEPSPEED_3_PARAMETERS:
            return replace(stage_3, to_gpu=sums + gathers)
        case OffloadScheme.DEEPSPEED_3_NVME | OffloadScheme.DEEPSPEED_3_ALL_NVME:
            states = (ADAM_STATES + FULL) * shard
            to_nvme = scheme is OffloadScheme.DEEPSPEED_3_ALL_NVME
            return replace(
                stage_3,
                to_gpu=sums + gathers,
                nvme_read=states + (gathers if to_nvme else 0),
                nvme_written=states + (HALF * shard if to_nvme else 0),
                host_memory=kernels + 2 * states + (gathers + HALF * shard if to_nvme else 0),
            )
        case OffloadScheme.FSDP2:
            return OffloadTraffic(
                from_gpu=FULL * times * shard,
                to_gpu=2 * FULL * times * shard,
                host_memory=ADAM_TRAFFIC * shard,
            )
