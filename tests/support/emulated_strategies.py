"""Strategies that emulate other runtimes, with every option that changes what is issued."""

from zsim.dtype import DType
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.ddp.options import DDP
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice, OffloadOptimizer, OffloadParam
from zsim_runtimes.fsdp1.options import FSDP1, BackwardPrefetch, ShardingStrategy
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy, Sync
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron

Named = dict[str, tuple[int, RuntimeOptions]]
"""By name the ZeRO stage and the runtime."""

FSDP2_OPTIONS: Named = {
    "fsdp2": (3, FSDP2()),
    "fsdp2 kept after forward": (3, FSDP2(reshard_after_forward=False)),
    "fsdp2 sharded over two": (3, FSDP2(reshard_after_forward=2)),
    "fsdp2 kept after backward": (3, FSDP2(reshard_after_backward=False)),
    "fsdp2 no sync": (3, FSDP2(gradient_sync=Sync.LAST)),
    "fsdp2 one all-reduce": (3, FSDP2(all_reduce=Sync.LAST)),
    "fsdp2 prefetch": (3, FSDP2(forward_prefetch=2)),
    "fsdp2 reduced in fp32": (3, FSDP2(reduce_dtype=DType.FP32)),
    "fsdp2 three inputs": (3, FSDP2(reduce_scatter_max_input_buffers=3)),
}

FSDP1_OPTIONS: Named = {
    "fsdp1": (3, FSDP1()),
    "fsdp1 shard_grad_op": (3, FSDP1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
    "fsdp1 no sync": (3, FSDP1(no_sync=True)),
    "fsdp1 shard_grad_op, no sync": (
        3,
        FSDP1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, no_sync=True),
    ),
    "fsdp1 prefetch after": (3, FSDP1(backward_prefetch=BackwardPrefetch.POST)),
    "fsdp1 no prefetch": (3, FSDP1(backward_prefetch=BackwardPrefetch.NONE)),
    "fsdp1 forward prefetch": (3, FSDP1(forward_prefetch=True)),
    "fsdp1 no limit": (3, FSDP1(limit_all_gathers=False)),
    "fsdp1 reduced in fp32": (3, FSDP1(reduce_dtype=DType.FP32)),
}

MEGATRON_OPTIONS: Named = {
    "megatron": (1, Megatron()),
    "megatron overlapped": (
        1,
        Megatron(bucket_size=40, overlap_grad_reduce=True, overlap_param_gather=True),
    ),
    "megatron reduced in fp32": (1, Megatron(grad_reduce_in_fp32=True, bucket_size=40)),
    "megatron summed whole in fp32": (
        1,
        Megatron(allreduce_in_float32=True, allreduce_bucket_size=40),
    ),
    "megatron averages": (
        1,
        Megatron(average_in_collective=True, overlap_grad_reduce=True, bucket_size=40),
    ),
}

NANOTRON_OPTIONS: Named = {
    "nanotron 0": (0, Nanotron()),
    "nanotron 1": (1, Nanotron()),
}

DEEPSPEED_OPTIONS: Named = {
    f"deepspeed {stage}{name}": (stage, runtime)
    for stage in (1, 2)
    for name, runtime in {
        "": DeepSpeed(reduce_bucket_size=60),
        " overlapped": DeepSpeed(reduce_bucket_size=60, overlap_comm=True),
        " one bucket": DeepSpeed(reduce_bucket_size=30_000, overlap_comm=True),
        " single parameters": DeepSpeed(reduce_bucket_size=7),
        " reduced in fp32": DeepSpeed(reduce_bucket_size=60, communication_data_type=DType.FP32),
    }.items()
}

DEEPSPEED3_OPTIONS: Named = {
    "deepspeed 3, all small": (3, DeepSpeed(reduce_bucket_size=30_000)),
    "deepspeed 3": (
        3,
        DeepSpeed(
            reduce_bucket_size=50,
            communication_data_type=DType.FP32,
            sub_group_size=20,
            stage3_prefetch_bucket_size=40,
            stage3_max_reuse_distance=30,
            stage3_param_persistence_threshold=6,
        ),
    ),
    "deepspeed 3 without overlap or prefetch": (
        3,
        DeepSpeed(
            reduce_bucket_size=30_000,
            overlap_comm=False,
            stage3_prefetch_bucket_size=0,
            stage3_max_reuse_distance=0,
            stage3_param_persistence_threshold=0,
        ),
    ),
    "deepspeed 3 with secondary shards": (
        3,
        DeepSpeed(
            reduce_bucket_size=7,
            sub_group_size=1,
            stage3_prefetch_bucket_size=40,
            stage3_max_reuse_distance=0,
            stage3_param_persistence_threshold=6,
            zero_hpz_partition_size=2,
        ),
    ),
}

FSDP2_OFFLOADED: Named = {
    "fsdp2 on the host": (3, FSDP2(offload_policy=OffloadPolicy.CPU)),
    "fsdp2 on the host, pageable, reduced in fp32": (
        3,
        FSDP2(offload_policy=OffloadPolicy.CPU, pin_memory=False, reduce_dtype=DType.FP32),
    ),
    "fsdp2 on the host, sharded over two, one all-reduce": (
        3,
        FSDP2(offload_policy=OffloadPolicy.CPU, reshard_after_forward=2, all_reduce=Sync.LAST),
    ),
}

DEEPSPEED_OFFLOADED: Named = {
    "deepspeed 1 with its optimizer on the cpu": (
        1,
        DeepSpeed(
            reduce_bucket_size=60, offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU)
        ),
    ),
    "deepspeed 2 with its optimizer on the cpu, overlapped, reduced in fp32": (
        2,
        DeepSpeed(
            reduce_bucket_size=60,
            overlap_comm=True,
            communication_data_type=DType.FP32,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU),
        ),
    ),
    "deepspeed 2 with its optimizer on the cpu, copies on their own stream": (
        2,
        DeepSpeed(
            reduce_bucket_size=60,
            migration_stream=True,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU),
        ),
    ),
    "deepspeed 2 with its optimizer on the cpu, single parameters, pageable": (
        2,
        DeepSpeed(
            reduce_bucket_size=7,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU, pin_memory=False),
        ),
    ),
}

DEEPSPEED3_OFFLOADED: Named = {
    "deepspeed 3 with its optimizer on the cpu": (
        3,
        DeepSpeed(
            reduce_bucket_size=50,
            communication_data_type=DType.FP32,
            sub_group_size=20,
            stage3_prefetch_bucket_size=40,
            stage3_max_reuse_distance=30,
            stage3_param_persistence_threshold=6,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU),
        ),
    ),
    "deepspeed 3 with parameters on the cpu as well": (
        3,
        DeepSpeed(
            reduce_bucket_size=7,
            sub_group_size=1,
            stage3_prefetch_bucket_size=40,
            stage3_max_reuse_distance=0,
            stage3_param_persistence_threshold=6,
            zero_hpz_partition_size=2,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU),
            offload_param=OffloadParam(device=OffloadDevice.CPU),
        ),
    ),
    "deepspeed 3 with parameters on the cpu as well, pageable, without overlap": (
        3,
        DeepSpeed(
            reduce_bucket_size=30_000,
            overlap_comm=False,
            stage3_prefetch_bucket_size=0,
            stage3_max_reuse_distance=0,
            stage3_param_persistence_threshold=0,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU, pin_memory=False),
            offload_param=OffloadParam(device=OffloadDevice.CPU),
        ),
    ),
}

DEEPSPEED3_FILED: Named = {
    "deepspeed 3 with its optimizer on nvme, one by one": (
        3,
        DeepSpeed(
            reduce_bucket_size=50,
            sub_group_size=40,
            stage3_param_persistence_threshold=6,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.NVME),
        ),
    ),
    "deepspeed 3 with its optimizer on nvme, pipelined, parameters on the cpu": (
        3,
        DeepSpeed(
            reduce_bucket_size=30_000,
            overlap_comm=False,
            sub_group_size=40,
            stage3_max_reuse_distance=0,
            stage3_param_persistence_threshold=0,
            offload_optimizer=OffloadOptimizer(
                device=OffloadDevice.NVME, buffer_count=12, pipeline_read=True, pipeline_write=True
            ),
            offload_param=OffloadParam(device=OffloadDevice.CPU),
        ),
    ),
}

REPLICATED_OPTIONS: Named = {
    "ddp": (0, DDP(bucket_cap_mb=0.0002)),
    "ddp views": (0, DDP(gradient_as_bucket_view=True, broadcast_buffers=3)),
    "ddp every micro-batch": (
        0,
        DDP(no_sync=False, find_unused_parameters=True, bucket_cap_mb=0.0002),
    ),
    "ddp views, every micro-batch": (
        0,
        DDP(no_sync=False, gradient_as_bucket_view=True, bucket_cap_mb=0.0002),
    ),
    "deepspeed 0": (0, DeepSpeed()),
}

OFFLOADED: Named = {
    **DEEPSPEED3_FILED,
    **DEEPSPEED3_OFFLOADED,
    **FSDP2_OFFLOADED,
    **DEEPSPEED_OFFLOADED,
}
"""Those that keep states in the memory of the host, or on drives."""

CHECKPOINTED: Named = {
    "fsdp1, checkpoints on the host": (3, FSDP1(offload_wrapper=True)),
    "fsdp2, checkpoints on the host": (3, FSDP2(offload_wrapper=True)),
    "fsdp2, checkpoints and shards on the host": (
        3,
        FSDP2(offload_wrapper=True, offload_policy=OffloadPolicy.CPU),
    ),
    "deepspeed 1, checkpoints on the host": (
        1,
        DeepSpeed(reduce_bucket_size=60, cpu_checkpointing=True),
    ),
    "deepspeed 2, checkpoints on the host, overlapped, on their stream": (
        2,
        DeepSpeed(
            reduce_bucket_size=60,
            overlap_comm=True,
            cpu_checkpointing=True,
            checkpoint_stream=True,
        ),
    ),
    "deepspeed 3, checkpoints on the host": (
        3,
        DeepSpeed(
            reduce_bucket_size=50,
            sub_group_size=20,
            stage3_prefetch_bucket_size=40,
            stage3_max_reuse_distance=30,
            stage3_param_persistence_threshold=6,
            cpu_checkpointing=True,
        ),
    ),
    "deepspeed 3, checkpoints and optimizer on the host, on their stream": (
        3,
        DeepSpeed(
            reduce_bucket_size=50,
            sub_group_size=20,
            stage3_param_persistence_threshold=6,
            cpu_checkpointing=True,
            checkpoint_stream=True,
            offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU),
        ),
    ),
}
"""Those that keep checkpoints in the memory of the host; blocks are run again."""

EMULATED: Named = {
    **DEEPSPEED_OPTIONS,
    **DEEPSPEED3_OPTIONS,
    **FSDP1_OPTIONS,
    **FSDP2_OPTIONS,
    **MEGATRON_OPTIONS,
    **NANOTRON_OPTIONS,
    **REPLICATED_OPTIONS,
}


def strategy(
    named: tuple[int, RuntimeOptions],
    *,
    data: int,
    replicate: int = 1,
    micro_batches: int = 1,
    precision: Precision = Precision.FP32,
    optimizer: Adam | SGD | None = None,
    clip_norm: float | None = None,
    checkpointing: Checkpointing = Checkpointing.NONE,
) -> Strategy | None:
    """The strategy; None where the options do not go with the number of ranks."""
    stage, runtime = named
    if replicate > 1 and runtime.without_replicas(stage=stage) is not None:
        return None
    if isinstance(runtime, DeepSpeed) and data % runtime.zero_hpz_partition_size:
        return None
    inner = runtime.reshard_after_forward if isinstance(runtime, FSDP2) else True
    if not isinstance(inner, bool) and data % inner:
        return None
    return Strategy(
        parallel=Parallel(data=data, replicate=replicate),
        zero=Zero(stage=stage, emulate=runtime),
        activations=Activations(checkpointing=checkpointing),
        train=Train(
            gradient_accumulation_steps=micro_batches,
            precision=precision,
            optimizer=optimizer or Adam(learning_rate=0.01, epsilon=1e-5),
            clip_norm=clip_norm,
        ),
    )
