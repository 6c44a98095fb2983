"""Search space of DeepSpeed."""

from collections.abc import Sequence
from dataclasses import replace

from zsim.runtimes.search import KeptBytes, Knobs, Options, SearchedAxes, SearchSpace
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice

STATES_ON_DRIVES: Options = {"sub_group_size": 100_000_000}
SHARDS_ON_DRIVES: Options = {
    "offload_param.buffer_count": 10,
    "offload_param.buffer_size": 200_000_000,
}
"""Buffers for drives: the default sub-group takes 16 GB of host memory a rank, and five slots of
100 million elements are too few and too small for current embeddings."""


def _offload(optimizer: str, parameters: str = "") -> Options:
    """Return the options that keep the optimizer and, if given, the parameters on devices."""
    return {
        "offload_optimizer.device": optimizer,
        **({"offload_param.device": parameters} if parameters else {}),
        **(STATES_ON_DRIVES if optimizer == "nvme" else {}),
        **(SHARDS_ON_DRIVES if parameters == "nvme" else {}),
    }


def _knobs(axes: SearchedAxes) -> Knobs:
    if not axes.stage:
        return {}
    found: dict[str, Sequence[object]] = {"reduce_bucket_size": (500_000_000, 50_000_000)}
    inner = axes.gpus_per_node // axes.tensor
    if axes.stage < 3:
        return {**found, "overlap_comm": (False, True)}
    if axes.nodes > 1 and inner > 1 and axes.context == 1:
        found["zero_hpz_partition_size"] = (1, inner)
    return {
        **found,
        "stage3_prefetch_bucket_size": (50_000_000, 500_000_000),
        "stage3_max_live_parameters": (1_000_000_000, 5_000_000_000),
        "stage3_max_reuse_distance": (1_000_000_000, 5_000_000_000),
    }


def _is_modeled(options: Options, checkpointing: str, axes: SearchedAxes) -> bool:
    """Return False for experts with tensor ranks, and expert ranks of stages 0 and 3 or offload."""
    del checkpointing
    if not axes.experts or (axes.expert, axes.tensor) == (1, 1):
        return True
    offloads = any("offload" in name for name in options)
    return axes.tensor == 1 and axes.stage in (1, 2) and not offloads


def kept(strategy: Strategy) -> KeptBytes:
    """Return the memory of gradients, of buckets, and of parameters that stay whole."""
    options, stage = strategy.options(DeepSpeed), strategy.zero.stage
    if not stage:
        return _kept_without_zero(strategy)
    compute = strategy.train.precision.compute.size_bytes
    wire = options.communication_data_type
    found = KeptBytes(
        bucket=options.reduce_bucket_size,
        bucket_bytes=compute * options.reduce_bucket_size,
        copied=compute if wire is None else wire.size_bytes,
    )
    return _kept_sharded(strategy, found) if stage == 3 else _kept_whole(strategy, found)


def _kept_without_zero(strategy: Strategy) -> KeptBytes:
    precision = strategy.train.precision
    compute, wide = precision.compute.size_bytes, precision.optimizer.size_bytes
    several = strategy.train.gradient_accumulation_steps > 1
    return KeptBytes(
        accumulated=compute if several else 0,
        done=0 if several else compute,
        update=compute + 2 * wide if precision.has_master else 0,
    )


def _kept_whole(strategy: Strategy, found: KeptBytes) -> KeptBytes:
    """Return the memory in stage 1, which reduces once, or 2, which has no whole gradients."""
    options, precision = strategy.options(DeepSpeed), strategy.train.precision
    several = strategy.train.gradient_accumulation_steps > 1
    compute = precision.compute.size_bytes
    own = 0 if options.offload_optimizer.is_on else compute
    if options.overlap_comm:
        found = replace(found, bucket_bytes=2 * found.bucket_bytes)
    if strategy.zero.stage == 1:
        return replace(
            found,
            accumulated=compute if several else 0,
            begun=0 if several else compute,
            reduces_last=not options.overlap_comm,
        )
    return replace(found, shard=2 * own if several else own)


def _kept_sharded(strategy: Strategy, found: KeptBytes) -> KeptBytes:
    """Return the memory in stage 3: shards, and parameters that are whole or gathered ahead."""
    options, compute = strategy.options(DeepSpeed), strategy.train.precision.compute.size_bytes
    gradients, parameters = not options.offload_optimizer.is_on, not options.offload_param.is_on
    has_parameters = parameters and strategy.train.precision.has_master  # else in masters
    shard = compute * (gradients + has_parameters)
    if options.offload_param.device is OffloadDevice.NVME:
        return replace(found, shard=shard)
    return replace(
        found,
        shard=shard,
        reused=options.stage3_max_reuse_distance,
        ahead=options.stage3_prefetch_bucket_size,
        live=options.stage3_max_live_parameters,
    )


SEARCH = SearchSpace(
    kept=kept,
    knobs=_knobs,
    offloads={
        1: (_offload("cpu"),),
        2: (_offload("cpu"),),
        3: (
            _offload("cpu", "none"),
            _offload("cpu", "cpu"),
            _offload("nvme", "none"),
            _offload("nvme", "cpu"),
            _offload("nvme", "nvme"),
        ),
    },
    choices={
        "optimizer-host": _offload("cpu"),
        "all-host": _offload("cpu", "cpu"),
        "optimizer-nvme": _offload("nvme"),
        "all-nvme": _offload("nvme", "nvme"),
    },
    checkpoints_on_host={"cpu_checkpointing": True},
    adds=frozenset(
        {
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
        }
    ),
    leaner=frozenset(
        {
            "reduce_bucket_size",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "zero_hpz_partition_size",
        }
    ),
    lighter=frozenset({"reduce_bucket_size"}),
    is_modeled=_is_modeled,
    is_slow=True,
)
