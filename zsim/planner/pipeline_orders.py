"""Pipeline schedules that a search considers in addition to 1F1B."""

from collections.abc import Callable, Iterator, Mapping

from zsim.planner.fleet import Changes

FSDP2_SCHEDULE = "zero.fsdp2.pipeline_schedule"
MEGATRON_CHUNK = "zero.megatron.num_layers_per_virtual_pipeline_stage"

FSDP2_ORDERS = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules with two chunks of layers on each stage, the default number."""

IN_TWO_PARTS = frozenset(FSDP2_ORDERS[1:])
"""Schedules with a backward in two parts."""

LAYERS_OF_CHUNK = (4, 2, 1)
"""Layers of a chunk in Megatron-LM, as in NVIDIA's recipes for H100 (github.com/NVIDIA/
dgxc-benchmarking, v25.02). Smaller chunks make bubbles shorter and send more often."""


def _fsdp2(pipeline: int, layers: int) -> Iterator[Changes]:
    del pipeline, layers
    for each in FSDP2_ORDERS:
        # zsim does not model freeing parameters after forward with several chunks.
        yield {FSDP2_SCHEDULE: each, "zero.fsdp2.reshard_after_forward": False}


def _megatron(pipeline: int, layers: int) -> Iterator[Changes]:
    of_stage, left = divmod(layers, pipeline)
    for of_chunk in LAYERS_OF_CHUNK:
        if not left and of_chunk < of_stage and of_stage % of_chunk == 0:
            yield {MEGATRON_CHUNK: of_chunk}


_ORDERS: Mapping[str, tuple[str, Callable[[int, int], Iterator[Changes]]]] = {
    "fsdp2": (FSDP2_SCHEDULE, _fsdp2),
    "megatron": (MEGATRON_CHUNK, _megatron),
}
"""The option that selects the schedule, and all schedules except the default, by runtime."""


def orders(runtime: str, *, pipeline: int, layers: int, fixed: Changes) -> tuple[Changes, ...]:
    """Return the changes of each schedule, the default first, that are compatible with `fixed`.

    `layers` is the number of layers of the whole model.
    """
    if pipeline == 1 or runtime not in _ORDERS:
        return ({},)
    name, every = _ORDERS[runtime]
    found = [
        each
        for each in every(pipeline, layers)
        if all(fixed.get(key, value) == value for key, value in each.items())
    ]
    return tuple(found) or ({},) if name in fixed else ({}, *found)


def order_of(changes: Changes) -> object:
    """Return the schedule among changes; None for the default."""
    return next((changes[name] for name, _ in _ORDERS.values() if name in changes), None)


def goes_with(changes: Changes, *, checkpoints: str, context: int) -> bool:
    """Return True if the changes of a group are modelled with these checkpoints and context ranks.

    A backward in two parts supports no recomputation and no shared sequences
    (`zsim.runtimes.fsdp2`). Products of Megatron-LM that overlap collectives support no
    recomputation of blocks.
    """
    if changes.get(FSDP2_SCHEDULE) in IN_TWO_PARTS:
        return checkpoints == "none" and context == 1
    return checkpoints != "full" or not changes.get("zero.megatron.tp_comm_overlap", False)
