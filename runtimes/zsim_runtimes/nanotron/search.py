"""Search space of nanotron."""

from zsim.runtimes.search import Knobs, SearchedAxes, SearchSpace


def _knobs(axes: SearchedAxes) -> Knobs:
    return {} if axes.tensor == 1 else {"tp_recompute_allgather": (True, False)}


SEARCH = SearchSpace(
    knobs=_knobs,
    tensor_modes=({}, {"tp_mode": "reduce_scatter"}),
    gathers_less=frozenset({"tp_recompute_allgather"}),
    is_slow=True,
)
