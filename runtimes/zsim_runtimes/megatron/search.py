"""Search space of Megatron-LM."""

from collections.abc import Iterator

from zsim.dtype import DType
from zsim.runtimes.search import KeptBytes, Knobs, Options, SearchedAxes, SearchSpace
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron

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


def kept(strategy: Strategy) -> KeptBytes:
    """Return the memory of the gradient buffer, and of its cast if one bucket has all of it."""
    options, precision = strategy.options(Megatron), strategy.train.precision
    wide = (DType.FP32 if options.grad_reduce_in_fp32 else precision.compute).size_bytes
    cast = strategy.kept_formats.gradient.size_bytes
    several = options.overlap_grad_reduce or options.fp8_param_gather or strategy.has_expert_order
    is_cast = not (several or strategy.zero.stage or wide == cast)
    return KeptBytes(permanent=wide, update=cast if is_cast else 0)


SEARCH = SearchSpace(
    kept=kept,
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
