"""Host memory that setup uses before a step runs: most runs with offload are killed there.

A model is built before it is sharded. If every rank of a node builds the whole model in host
memory, as `torch.nn.Module` and `from_pretrained` do by default, the node holds one copy per rank.
If it is built on the meta device or inside `deepspeed.zero.Init`, the node holds no full copy.
Setup allocates its training buffers in addition, because copies stay until their parts are moved.
"""

from enum import StrEnum


class HostSetup(StrEnum):
    """Methods of building a model."""

    SHARDED = "sharded"
    """Never whole: built on the meta device, or each parameter is sharded when it is created."""
    ONE_RANK = "one_rank"
    """Whole on one rank of each node, which sends the others their parts."""
    EVERY_RANK = "every_rank"
    """Whole on every rank."""


def built_bytes(setup: HostSetup, parameters: int, *, size_bytes: int, ranks: int) -> int:
    """Return the host bytes that `ranks` of a node hold while a model of `parameters` is built.

    `size_bytes` is the size of an element in the dtype of the build: 4 in fp32, PyTorch's default.
    """
    copies = {HostSetup.SHARDED: 0, HostSetup.ONE_RANK: 1, HostSetup.EVERY_RANK: ranks}
    return copies[setup] * parameters * size_bytes
