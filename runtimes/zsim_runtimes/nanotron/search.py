"""Search space of nanotron."""

from zsim.dtype import DType
from zsim.runtimes.search import KeptBytes, Knobs, SearchedAxes, SearchSpace
from zsim.strategy.strategy import Strategy


def kept(strategy: Strategy) -> KeptBytes:
    """Return the memory of fp32 gradients, DDP's buckets, and autograd's own until a step ends."""
    compute = strategy.train.precision.compute.size_bytes
    is_wrapped = strategy.parallel.data > 1 and strategy.zero.stage == 0
    return KeptBytes(permanent=DType.FP32.size_bytes + compute * is_wrapped, done=compute)


def _knobs(axes: SearchedAxes) -> Knobs:
    return {} if axes.tensor == 1 else {"tp_recompute_allgather": (True, False)}


SEARCH = SearchSpace(
    kept=kept,
    knobs=_knobs,
    tensor_modes=({}, {"tp_mode": "reduce_scatter"}),
    gathers_less=frozenset({"tp_recompute_allgather"}),
    is_slow=True,
)
