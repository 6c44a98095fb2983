"""Search space of FSDP2."""

from collections.abc import Iterator

from zsim.runtimes.search import KeptBytes, Knobs, Options, SearchedAxes, SearchSpace
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp2.options import FSDP2, Sync
from zsim_runtimes.fsdp2.order import WHOLE_CHUNKS

SCHEDULE = "pipeline_schedule"

ORDERS = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
"""With two chunks of layers on each stage, the default number."""

IN_TWO_PARTS = frozenset(ORDERS[1:])
"""Orders whose backward passes are in two parts."""


def _knobs(axes: SearchedAxes) -> Knobs:
    if axes.pipeline > 1:  # a stage reduces once, and prefetches nothing
        return {"reshard_after_forward": (True, False)}
    inner = axes.gpus_per_node // axes.tensor
    spreads = axes.nodes > 1 and axes.replicate == 1 and inner > 1
    spreads = spreads and axes.context == axes.expert == 1  # the data axis is split once
    return {
        "reshard_after_forward": (True, False, *((inner,) if spreads else ())),
        "gradient_sync": ("every", "last"),
        "forward_prefetch": (0, 1, 2) if axes.expert == 1 else (1, 2),
    }


def _orders(pipeline: int, layers: int) -> Iterator[Options]:
    del pipeline, layers
    for each in ORDERS:
        # With several chunks, freeing parameters after forward is not modeled.
        yield {SCHEDULE: each, "reshard_after_forward": False}


def _is_modeled(options: Options, checkpointing: str, axes: SearchedAxes) -> bool:
    """Return False for a backward of two parts with recomputation or shared sequences."""
    if options.get(SCHEDULE) not in IN_TWO_PARTS:
        return True
    return checkpointing == "none" and axes.context == 1


def kept(strategy: Strategy) -> KeptBytes:
    """Return the memory of whole parameters and gradients; gathers run a block ahead."""
    options, precision = strategy.options(FSDP2), strategy.train.precision
    formats = options.formats(
        stage=strategy.zero.stage, compute=precision.compute, optimizer=precision.optimizer
    )
    several = strategy.train.gradient_accumulation_steps > 1
    at_once = several and options.gradient_sync is Sync.LAST
    is_partial = several and strategy.parallel.replicate > 1 and options.all_reduce is Sync.LAST
    form = formats.reduction if is_partial else formats.reduced
    shard = 0 if options.on_host else form.size_bytes
    stays = options.reshard_after_forward is False
    return KeptBytes(
        gathered=frozenset(["ahead", "root"] + ["blocks"] * stays),
        accumulated=formats.whole.size_bytes if at_once else 0,
        shard=shard if several and not at_once else 0,
        done_shard=0 if several else shard,
        reducing=0 if at_once else formats.reduction.size_bytes,
        collected=formats.whole.size_bytes,
        chunks=WHOLE_CHUNKS if stays else 0,
    )


SEARCH = SearchSpace(
    kept=kept,
    knobs=_knobs,
    offloads={3: ({"offload_policy": "cpu"},)},
    choices={"all-host": {"offload_policy": "cpu"}},
    checkpoints_on_host={"offload_wrapper": True},
    compiled_tensor_modes=({"enable_async_tensor_parallel": True},),
    order_option=SCHEDULE,
    orders=_orders,
    is_modeled=_is_modeled,
    adds=frozenset({"reshard_after_forward", "gradient_sync", "forward_prefetch"}),
    leaner=frozenset({"reshard_after_forward"}),
    comes_first=True,
)
