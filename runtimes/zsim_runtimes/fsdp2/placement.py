"""Sizes of parameters with the padding that `fully_shard` adds to their sharded dimension."""

from enum import StrEnum
from math import prod

from zsim.model.model import ModelError, Parameter


class ShardPlacement(StrEnum):
    """The dimension along which parameters are sharded: `shard_placement_fn` of `fully_shard`."""

    FIRST = "first"
    """The first of each parameter, the default of PyTorch."""
    EXPERTS = "experts"
    """The second of stacked weights of experts if there are more ranks than experts, as in
    `_experts_shard_placement_fn` of torchtitan (torchtitan/distributed/fsdp.py, b5bcd76c)."""


def padded_elements(parameter: Parameter, ranks: int, placement: ShardPlacement) -> int:
    """Return the elements of a parameter with the padding that makes equal shards on `ranks`.

    Raises:
        ModelError: the ranks do not divide the second dimension along which it is sharded.
    """
    rows, *others = parameter.shape or (1,)
    if placement is ShardPlacement.EXPERTS and 0 < parameter.experts < ranks:
        # FSDPParam._init_sharded_param (_fsdp_param.py, torch 2.13): "FSDP does not support uneven
        # sharding on dim 1"
        if others[0] % ranks:
            raise ModelError(
                f"zero.fsdp2.shard_placement_fn: {ranks} ranks must divide the {others[0]} rows of "
                f"each expert of {parameter.name}; say first, or use fewer ranks"
            )
        return parameter.elements
    # FSDPParam._init_sharded_param: chunks of dimension 0, padded to the largest
    return -(-rows // ranks) * ranks * prod(others)
