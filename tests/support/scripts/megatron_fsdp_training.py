"""ZeRO-3 with Megatron-FSDP: `FOLDER [double [mended]]`, to be recorded with `--cuda`."""

import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

FOLDER, *OPTIONS = sys.argv[1:]
sys.path.insert(0, FOLDER)


class Layer(nn.Module):
    """Two linear layers and what goes past them."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(32, 32)
        self.narrow = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrowed: torch.Tensor = self.narrow(torch.relu(self.widen(x)))
        return x + narrowed


def mend() -> None:
    """Let the compute stream wait too before a double buffer is used again."""
    pipeline: Any = import_module("megatron_fsdp.param_and_grad_buffer").GradReducePipeline
    limit = pipeline._enforce_double_buffer_limit

    def wait_on_both(self: Any, buckets: Any) -> None:
        limit(self, buckets)
        torch.cuda.current_stream().wait_stream(self.rs_stream)

    pipeline._enforce_double_buffer_limit = wait_on_both


dist.init_process_group("nccl")
if "mended" in OPTIONS:
    mend()
net: Any = nn.Sequential(*[Layer() for _ in range(5)]).cuda()
optimizer: Any = torch.optim.AdamW(net.parameters())
mesh = init_device_mesh("cuda", (4, 1), mesh_dim_names=("dp", "tp"))
net, optimizer = import_module("megatron_fsdp").fully_shard(
    module=net,
    optimizer=optimizer,
    device_mesh=mesh,
    dp_shard_dim="dp",
    tp_dim="tp",
    fsdp_unit_modules=[Layer],
    zero_dp_strategy=3,
    fsdp_double_buffer="double" in OPTIONS,
)
for _ in range(3):
    net(torch.ones(4, 32, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
