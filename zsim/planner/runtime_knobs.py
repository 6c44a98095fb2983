"""Knobs of each runtime, and their values that a search tries."""

from collections.abc import Callable, Mapping, Sequence

from zsim.planner.fleet import Degrees, Fleet

Knobs = Mapping[str, Sequence[object]]
"""Values of options by name; the first is the default, which settings omit."""


def no_knobs(fleet: Fleet, stage: int, degrees: Degrees) -> Knobs:
    """Return no knobs: a runtime that is not in `KNOBS` uses its defaults."""
    del fleet, stage, degrees
    return {}


def _fsdp1(fleet: Fleet, stage: int, degrees: Degrees) -> Knobs:
    del fleet, stage, degrees
    return {
        "sharding_strategy": ("full_shard", "shard_grad_op"),
        "forward_prefetch": (False, True),
        "limit_all_gathers": (True, False),
        "no_sync": (False, True),
    }


def _fsdp2(fleet: Fleet, stage: int, degrees: Degrees) -> Knobs:
    del stage
    if degrees.pipeline > 1:  # a stage reduces once, without prefetching
        return {"reshard_after_forward": (True, False)}
    inner = fleet.gpus_per_node // degrees.tensor
    spreads = fleet.nodes > 1 and degrees.replicate == 1 and inner > 1
    spreads = spreads and degrees.context == 1  # the data axis is split once
    return {
        "reshard_after_forward": (True, False, *((inner,) if spreads else ())),
        "gradient_sync": ("every", "last"),
        "forward_prefetch": (0, 1, 2),
    }


def _deepspeed(fleet: Fleet, stage: int, degrees: Degrees) -> Knobs:
    found: dict[str, Sequence[object]] = {"reduce_bucket_size": (500_000_000, 50_000_000)}
    inner = fleet.gpus_per_node // degrees.tensor
    if stage < 3:
        return {**found, "overlap_comm": (False, True)}
    if fleet.nodes > 1 and inner > 1 and degrees.context == 1:
        found["zero_hpz_partition_size"] = (1, inner)
    return {
        **found,
        "stage3_prefetch_bucket_size": (50_000_000, 500_000_000),
        "stage3_max_live_parameters": (1_000_000_000, 5_000_000_000),
        "stage3_max_reuse_distance": (1_000_000_000, 5_000_000_000),
    }


def _megatron(fleet: Fleet, stage: int, degrees: Degrees) -> Knobs:
    del fleet, degrees
    reduces: Knobs = {"overlap_grad_reduce": (False, True)}
    return {**reduces, "overlap_param_gather": (False, True)} if stage else reduces


def _nanotron(fleet: Fleet, stage: int, degrees: Degrees) -> Knobs:
    del fleet, stage
    if degrees.tensor == 1:
        return {}
    return {"tp_recompute_allgather": (True, False)}


KNOBS: Mapping[str, Callable[[Fleet, int, Degrees], Knobs]] = {
    "deepspeed": _deepspeed,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "megatron": _megatron,
    "nanotron": _nanotron,
}
"""Options of each runtime that a search varies; all others keep their defaults."""
