"""Search space of FSDP2."""

from collections.abc import Iterator

from zsim.runtimes.search import Knobs, Options, SearchedAxes, SearchSpace

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


SEARCH = SearchSpace(
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
