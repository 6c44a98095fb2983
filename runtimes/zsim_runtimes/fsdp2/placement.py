"""Sizes of parameters with the padding that `fully_shard` adds to their sharded dimension."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from math import prod

from zsim.model.model import Model, ModelError, Parameter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, ExpertPacking, Packed, Packing, ShardAxis
from zsim.zero.names import DATA, EXPERT_DATA


class ShardPlacement(StrEnum):
    """The dimension along which parameters are sharded: `shard_placement_fn` of `fully_shard`."""

    FIRST = "first"
    """The first of each parameter, the default of PyTorch."""
    EXPERTS = "experts"
    """The second of stacked weights of experts if there are more ranks than experts, as in
    `_experts_shard_placement_fn` of torchtitan (torchtitan/distributed/fsdp.py, b5bcd76c)."""


def shard_axis(bucket: Bucket, strategy: Strategy) -> ShardAxis:
    """Return the axis over which a bucket is sharded, and its ranks."""
    if bucket.axis == EXPERT_DATA:
        return ShardAxis(EXPERT_DATA, strategy.expert_data)
    return ShardAxis(DATA, strategy.parallel.data)


def padded_rows(ranks: int, placement: ShardPlacement) -> Packing:
    """Return a packing in which the sharded dimension of each parameter is padded to a multiple."""

    def place(parameters: Sequence[Parameter]) -> Packed:
        ends = [padded_elements(each, ranks, placement) for each in parameters]
        starts = (0, *accumulate(ends))
        return Packed(starts=starts[:-1], elements=starts[-1], blocks=starts[:-1])

    return place


def of_experts(strategy: Strategy, placement: ShardPlacement) -> ExpertPacking | None:
    """Return the packing of groups of experts; None if experts have no separate rank order."""
    return ExpertPacking.of(strategy, lambda ranks: padded_rows(ranks, placement))


def by_second(parameter: Parameter, ranks: int, placement: ShardPlacement) -> bool:
    """Return True if a parameter is sharded over `ranks` along its second dimension."""
    return placement is ShardPlacement.EXPERTS and 0 < parameter.experts < ranks


def sharded_by_second(
    model: Model, buckets: Sequence[Bucket], strategy: Strategy, placement: ShardPlacement
) -> list[int]:
    """Return the number of parameters of each bucket that are sharded by the second dimension."""
    shapes = {each.name: each for each in model.parameters}
    return [
        sum(
            by_second(shapes[name], shard_axis(bucket, strategy).ranks, placement)
            for name in {each.parameter for each in bucket.layout.pieces}
        )
        for bucket in buckets
    ]


def padded_elements(parameter: Parameter, ranks: int, placement: ShardPlacement) -> int:
    """Return the elements of a parameter with the padding that makes equal shards on `ranks`.

    Raises:
        ModelError: the ranks do not divide the second dimension along which it is sharded.
    """
    rows, *others = parameter.shape or (1,)
    if by_second(parameter, ranks, placement):
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
