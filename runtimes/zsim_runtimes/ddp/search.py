"""Search space of DistributedDataParallel."""

from zsim.runtimes.search import Knobs, SearchedAxes, SearchSpace


def _knobs(axes: SearchedAxes) -> Knobs:
    del axes
    return {
        "gradient_as_bucket_view": (False, True),
        "comm_hook": ("none", "bf16_compress"),
    }


SEARCH = SearchSpace(knobs=_knobs, leaner=frozenset({"gradient_as_bucket_view", "comm_hook"}))
