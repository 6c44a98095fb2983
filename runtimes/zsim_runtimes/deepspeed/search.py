"""Search space of DeepSpeed."""

from collections.abc import Sequence

from zsim.runtimes.search import Knobs, Options, SearchedAxes, SearchSpace

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


SEARCH = SearchSpace(
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
    is_modeled=_is_modeled,
    is_slow=True,
)
