"""Search space of FSDP1."""

from zsim.runtimes.search import Knobs, SearchedAxes, SearchSpace


def _knobs(axes: SearchedAxes) -> Knobs:
    del axes
    return {
        "sharding_strategy": ("full_shard", "shard_grad_op"),
        "forward_prefetch": (False, True),
        "limit_all_gathers": (True, False),
        "no_sync": (False, True),
    }


SEARCH = SearchSpace(
    knobs=_knobs,
    checkpoints_on_host={"offload_wrapper": True},
    leaner=frozenset({"no_sync", "sharding_strategy"}),
)
