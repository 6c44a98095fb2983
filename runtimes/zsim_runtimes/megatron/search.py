"""Search space of Megatron-LM."""

from collections.abc import Iterator

from zsim.runtimes.search import Knobs, Options, SearchedAxes, SearchSpace

CHUNK = "num_layers_per_virtual_pipeline_stage"

LAYERS_OF_CHUNK = (4, 2, 1)
"""Layers of a chunk, as in NVIDIA's recipes for H100 (github.com/NVIDIA/dgxc-benchmarking,
v25.02). Smaller chunks leave stages idle for less time and send more often."""

CONCURRENT: Options = {"async_tensor_model_parallel_allreduce": True}
"""The default of Megatron-LM."""


def _knobs(axes: SearchedAxes) -> Knobs:
    reduces: Knobs = {"overlap_grad_reduce": (False, True)}
    return {**reduces, "overlap_param_gather": (False, True)} if axes.stage else reduces


def _combines(options: Options) -> bool:
    """Return True unless parameters are gathered ahead, but gradients are not reduced ahead."""
    gathers, reduces = (
        options.get(f"overlap_{name}", False) for name in ("param_gather", "grad_reduce")
    )
    return bool(reduces) or not gathers


def _orders(pipeline: int, layers: int) -> Iterator[Options]:
    of_stage, left = divmod(layers, pipeline)
    for of_chunk in LAYERS_OF_CHUNK:
        if not left and of_chunk < of_stage and of_stage % of_chunk == 0:
            yield {CHUNK: of_chunk}


def _is_modeled(options: Options, checkpointing: str, axes: SearchedAxes) -> bool:
    """Return False for overlap in userbuffers with recomputation.

    Experts need sequence parallelism on a tensor axis. Attention around a ring is not recomputed by
    operations.
    """
    overlaps = options.get("tp_comm_overlap", False)
    if axes.experts and axes.tensor > 1 and not options.get("sequence_parallel"):
        return False
    if checkpointing == "operations" and axes.context > 1:
        return False
    return checkpointing != "full" or not overlaps


SEARCH = SearchSpace(
    knobs=_knobs,
    combines=_combines,
    tensor_modes=(
        CONCURRENT,
        {"sequence_parallel": True, **CONCURRENT},
        {"sequence_parallel": True, "tp_comm_overlap": True},
    ),
    order_option=CHUNK,
    orders=_orders,
    chunk_option=CHUNK,
    is_modeled=_is_modeled,
)
