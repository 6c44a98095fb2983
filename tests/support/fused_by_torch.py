"""Products that the compiler of the installed PyTorch fuses with collectives of tokens.

A block is compiled for ranks that are pretended; the compiler's pass runs on its graphs, and no
graph is run as the pass has changed it. To import the compiler takes 4 s of processor time, so a
test imports this module when it runs.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch
from torch import distributed, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

with catch_warnings():  # of a module that the compiler's passes import
    simplefilter("ignore", DeprecationWarning)
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape

PARTITION: Callable[..., object] = min_cut_rematerialization_partition
RESHAPE: Callable[[GraphModule], object] = view_to_reshape

RANKS, WIDTH, HEADS, TOKENS = 4, 64, 8, 8
"""Sizes of the block, which the schedule has too."""
NAMES = {
    "symm_mem.fused_all_gather_matmul.default": ("gather", True),
    "symm_mem.fused_matmul_reduce_scatter.default": ("scatter", True),
    "_c10d_functional.all_gather_into_tensor.default": ("gather", False),
    "_c10d_functional.reduce_scatter_tensor.default": ("scatter", False),
}
"""Nodes of a graph: which collective they are, and whether a product is fused with it."""


class Attention(nn.Module):
    """Attention as torchtitan's models have it, but for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens before."""
        sequences, tokens, _ = source.shape
        shape = (sequences, tokens, -1, WIDTH // HEADS)
        heads = [each(source).view(shape).transpose(1, 2) for each in (self.wq, self.wk, self.wv)]
        queries, keys, values = heads
        made = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        found: torch.Tensor = self.wo(made.transpose(1, 2).reshape(sequences, tokens, -1))
        return found


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Return what the MLP makes."""
        made: torch.Tensor = self.w2(nn.functional.silu(self.w1(source)) * self.w3(source))
        return made


class Block(nn.Module):
    """A block with the styles of `apply_tp` (torchtitan 0.2.2, models/llama3/infra/parallelize)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": whole,
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": whole,
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(self, init_device_mesh("cpu", (RANKS,)), plan)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Return the block's hidden state."""
        middle = source + self.attention(self.attention_norm(source))
        made: torch.Tensor = middle + self.feed_forward(self.ffn_norm(middle))
        return made


@contextmanager
def pretended_ranks() -> Generator[None]:
    """Pretend that there are ranks with NCCL, and symmetric memory among them."""
    with patch.object(distributed, "is_nccl_available", lambda: True):
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        torch.compiler.reset()
        yield
        distributed.destroy_process_group()
        torch.compiler.reset()


def fused_by_torch(sequences: int) -> list[Counter[tuple[str, bool]]]:
    """Return collectives of forward and backward, and if the compiler fuses products with them."""
    found: list[Counter[tuple[str, bool]]] = []

    def compiled(graph: GraphModule, examples: Sequence[object]) -> Callable[..., object]:
        del examples
        own = deepcopy(graph)
        first = next(node for node in graph.graph.nodes if node.op == "placeholder")
        RESHAPE(graph)
        with (
            symmetric_memory._test_mode(),  # pyright: ignore[reportPrivateUsage]  # has no other
            config.patch(_micro_pipeline_tp=True),
            V.set_fake_mode(first.meta["val"].fake_mode),
        ):
            post_grad_passes(graph, is_inference=False)
        targets = (str(node.target) for node in graph.graph.nodes)
        found.append(Counter(NAMES[each] for each in targets if each in NAMES))
        return boxed(own)

    def cut(joint: GraphModule, *inputs: object, **options: object) -> object:
        joint_graph_passes(joint)
        return PARTITION(joint, *inputs, **options)

    backend = aot_autograd(
        decompositions=select_decomp_table(),
        fw_compiler=compiled,
        bw_compiler=compiled,
        partition_fn=cut,
    )
    source = torch.randn(sequences, TOKENS, WIDTH, requires_grad=True)
    torch.compile(Block(), backend=backend)(source).sum().backward()
    return found


def boxed(graph: GraphModule) -> Callable[..., object]:
    """A graph that takes its inputs in a list, as the compiler gives them."""

    def run(inputs: list[object]) -> object:
        return graph(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
