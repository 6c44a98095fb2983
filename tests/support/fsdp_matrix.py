"""Ways to train with FSDP2, each a short script for a recording."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

WIDTH = 32
VOCABULARY = 64
WORLD = 4


@dataclass(frozen=True, kw_only=True)
class FsdpRun:
    """One way to train."""

    hybrid: bool = False
    reshard: bool | int | None = None
    bf16: bool = False
    offload: bool = False
    micro_batches: int = 1
    sync: str = "last"
    """Whether gradients are reduced after the last micro-batch, after each, or not all-reduced."""
    prefetch: bool = False
    frozen: bool = False
    tied: bool = False
    checkpoint: bool = False
    second_dimension: bool = False
    """Parameters are sharded along their second dimension."""
    unshard_ahead: bool = False
    """The script gathers each layer itself, without a wait."""
    input_buffers: int = 1
    separate_group: bool = False
    """Reduce-scatters have a communicator of their own."""
    hook: Callable[[nn.Parameter], None] | None = None
    """Called after a gradient was accumulated."""
    asks_loss: bool = False
    """The host waits for the loss of each step, which orders much."""
    layers: int = 3
    steps: int = 2


RUNS = {
    "fsdp": FsdpRun(),
    "fsdp, never resharded": FsdpRun(reshard=False),
    "fsdp, resharded to 2": FsdpRun(reshard=2),
    "fsdp, bf16": FsdpRun(bf16=True, asks_loss=True),
    "fsdp, offload": FsdpRun(offload=True),
    "fsdp, offload, bf16": FsdpRun(offload=True, bf16=True),
    "fsdp, accumulation": FsdpRun(micro_batches=2),
    "fsdp, accumulation, reduced each time": FsdpRun(micro_batches=2, sync="each"),
    "fsdp, offload, accumulation": FsdpRun(offload=True, micro_batches=2, sync="each"),
    "fsdp, prefetch": FsdpRun(prefetch=True),
    "fsdp, prefetch, bf16, offload": FsdpRun(prefetch=True, bf16=True, offload=True),
    "fsdp, frozen": FsdpRun(frozen=True),
    "fsdp, tied": FsdpRun(tied=True),
    "fsdp, checkpoint": FsdpRun(checkpoint=True),
    "fsdp, second dimension": FsdpRun(second_dimension=True),
    "fsdp, unshard ahead": FsdpRun(unshard_ahead=True),
    "fsdp, two input buffers": FsdpRun(input_buffers=2),
    "fsdp, separate group": FsdpRun(separate_group=True),
    "hsdp": FsdpRun(hybrid=True),
    "hsdp, never resharded": FsdpRun(hybrid=True, reshard=False),
    "hsdp, bf16": FsdpRun(hybrid=True, bf16=True),
    "hsdp, offload": FsdpRun(hybrid=True, offload=True),
    "hsdp, offload, bf16": FsdpRun(hybrid=True, offload=True, bf16=True),
    "hsdp, accumulation": FsdpRun(hybrid=True, micro_batches=2),
    "hsdp, accumulation, all-reduced last": FsdpRun(
        hybrid=True, micro_batches=2, sync="all-reduce last"
    ),
    "hsdp, offload, accumulation": FsdpRun(hybrid=True, offload=True, micro_batches=2, sync="each"),
    "hsdp, prefetch, bf16": FsdpRun(hybrid=True, prefetch=True, bf16=True),
    "hsdp, frozen, bf16": FsdpRun(hybrid=True, frozen=True, bf16=True),
}

VALUES = {
    "sharded": FsdpRun(
        reshard=False,
        bf16=True,
        micro_batches=2,
        sync="each",
        prefetch=True,
        tied=True,
        input_buffers=2,
        asks_loss=True,
    ),
    "sharded, resharded to 2": FsdpRun(
        reshard=2,
        frozen=True,
        checkpoint=True,
        unshard_ahead=True,
        separate_group=True,
    ),
    "sharded along the second dimension": FsdpRun(second_dimension=True),
    "hybrid, offload": FsdpRun(hybrid=True, offload=True, micro_batches=2, sync="all-reduce last"),
}
"""Runs in which every value of each option of `RUNS` is once."""


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrowed: torch.Tensor = self.narrow(torch.relu(self.widen(self.norm(x))))
        return x + narrowed


class _Net(nn.Module):
    def __init__(self, run: FsdpRun) -> None:
        super().__init__()
        self.run = run
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(run.layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if run.tied:
            self.head.weight = self.embed.weight
        if run.frozen:
            for parameter in (*self.embed.parameters(), *self.layers[0].parameters()):
                parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.run.unshard_ahead:
            for layer in self.layers:
                cast("FSDPModule", layer).unshard(async_op=True)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def train(run: FsdpRun, world: int = WORLD) -> None:
    """Train as `run` says; the process group is started here."""
    dist.init_process_group("nccl")
    shape, names = ((2, world // 2), ("replicate", "shard")) if run.hybrid else ((world,), None)
    mesh = init_device_mesh("zsim", shape, mesh_dim_names=names)
    with torch.device("cpu" if run.offload else "zsim"):
        net = _Net(run)
    layers = _shard(net, run, partial(fully_shard, **_options(run, mesh)))
    root = cast("FSDPModule", net)
    root.set_reduce_scatter_max_input_buffers(run.input_buffers)
    if run.separate_group:
        root.set_separate_reduce_scatter_group(enable=True)
    if run.prefetch:
        for before, after in pairwise(layers):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    if run.hook is not None:
        for parameter in net.parameters():
            cast("Any", parameter).register_post_accumulate_grad_hook(run.hook)
    optimizer = torch.optim.AdamW(each for each in net.parameters() if each.requires_grad)
    for _ in range(run.steps):
        for number in range(run.micro_batches):
            _set_sync(root, run, is_last=number == run.micro_batches - 1)
            tokens = torch.randint(VOCABULARY, (4, 8), device="zsim")
            logits = net(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            cast("Any", loss).backward()
            if run.asks_loss:
                loss.item()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _options(run: FsdpRun, mesh: object) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": run.reshard}
    options["offload_policy"] = CPUOffloadPolicy() if run.offload else OffloadPolicy()
    if run.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if run.second_dimension:
        options["shard_placement_fn"] = lambda parameter: Shard(min(1, parameter.ndim - 1))
    return options


def _shard(net: _Net, run: FsdpRun, shard: Callable[[nn.Module], object]) -> list[FSDPModule]:
    for number, layer in enumerate(net.layers):
        if run.checkpoint:
            net.layers[number] = checkpoint_wrapper(layer)
        shard(net.layers[number])
    if not run.tied:
        shard(net.head)
    shard(net)
    return [cast("FSDPModule", layer) for layer in net.layers]


def _set_sync(root: FSDPModule, run: FsdpRun, *, is_last: bool) -> None:
    if run.sync == "last":
        root.set_requires_gradient_sync(is_last)
    elif run.sync == "all-reduce last":
        root.set_requires_all_reduce(is_last)
