"""Host memory that set-up takes before a step runs: where most runs with offload are killed.

A model is built before it is sharded. Where every rank of a node builds all of it in host memory,
as `torch.nn.Module` and `from_pretrained` do by default, the node holds as many copies; where it is
built on the meta device or inside `deepspeed.zero.Init`, none. What set-up allocates for training
comes on top, since the copies stay until their parts are where they belong.
"""

from enum import StrEnum


class HostSetup(StrEnum):
    """Ways in which a model is built."""

    SHARDED = "sharded"
    """Nowhere whole: on the meta device, or each parameter is sharded when it is made."""
    ONE_RANK = "one_rank"
    """Whole on one rank of each node, which sends the others their parts."""
    EVERY_RANK = "every_rank"
    """Whole on every rank."""


def built_bytes(setup: HostSetup, parameters: int, *, size_bytes: int, ranks: int) -> int:
    """Return what `ranks` of a node hold while a model of `parameters` is built.

    `size_bytes` is of an element, as it is built: 4 in fp32, PyTorch's default.
    """
    copies = {HostSetup.SHARDED: 0, HostSetup.ONE_RANK: 1, HostSetup.EVERY_RANK: ranks}
    return copies[setup] * parameters * size_bytes
