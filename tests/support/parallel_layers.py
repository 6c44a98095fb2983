"""Collectives that PyTorch issues for layers that are parallelized one by one, as JSON.

A process of its own: it has a process group that does nothing, and compiles.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, SEQUENCES, TOKENS, WIDTH, INNER = 4, 2, 8, 16, 128
KINDS = {
    "all_gather_into_tensor": "gathers",
    "reduce_scatter_tensor": "scatters",
    "cat": "copies",
}


class Layers(nn.Module):
    """A norm, two layers that read it, and one that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        normed = self.norm(given)
        made: torch.Tensor = self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return made


def counted(names: Sequence[str]) -> Counter[str]:
    """Return how often each kind is among the names of operations."""
    return Counter(kind for name in names for part, kind in KINDS.items() if f".{part}" in name)


def compiler(found: dict[str, Counter[str]], direction: str) -> Callable[..., GraphModule]:
    """Return a compiler that leaves a graph as it is, and notes its counts under `direction`."""

    def compiled(graph: GraphModule, given: object) -> GraphModule:
        del given
        found[direction] = counted([str(node.target) for node in graph.graph.nodes])
        return graph

    return compiled


def main() -> None:
    """Print counts of the compiled forward and backward, and of both without a compiler."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    layers = Layers()
    reads, makes = Shard(1), Shard(1)
    plan = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=reads),
        "up": ColwiseParallel(input_layouts=reads),
        "down": RowwiseParallel(output_layouts=makes),
    }
    parallelize_module(layers, mesh, cast("Any", plan))
    own = torch.randn(SEQUENCES, TOKENS // RANKS, WIDTH, requires_grad=True)
    given = DTensor.from_local(own, mesh, [Shard(1)])
    eager = cast("Callable[[], CommDebugMode]", CommDebugMode)()  # which has no types
    with eager:
        layers(given).sum().backward()
    issued = {str(name): count for name, count in eager.get_comm_counts().items()}
    found: dict[str, Counter[str]] = {}
    backend = aot_autograd(
        fw_compiler=compiler(found, "forward"),
        bw_compiler=compiler(found, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(layers, backend=backend)(given).sum().backward()
    alone = counted([name for name, count in issued.items() for _ in range(count)])
    sys.stdout.write(json.dumps({"eager": alone, **found}) + "\n")


if __name__ == "__main__":
    main()
