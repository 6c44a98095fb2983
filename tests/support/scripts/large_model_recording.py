"""80 layers of width 8,192 on rank 5 of 1,024, recorded; prints what it took as JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from zsim_record import recording

sys.path.append(str(Path(__file__).parents[1]))

from memory_peak import peak_bytes

WIDTH, HEADS, LAYERS = 8192, 64, 80


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.project(self.first_norm(x)).view(*x.shape[:2], 3, HEADS, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        narrowed: torch.Tensor = self.narrow(nn.functional.gelu(self.widen(self.second_norm(x))))
        return x + narrowed


with recording(world=1024, rank=5) as tape:
    dist.init_process_group("nccl")
    options: dict[str, Any] = {
        "mesh": init_device_mesh("zsim", (128, 8), mesh_dim_names=("replicate", "shard")),
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    with torch.device("cpu"):
        net = nn.Sequential(*[Block() for _ in range(LAYERS)])
    for block in (*net, net):
        fully_shard(block, **options)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        x = torch.randn(1, 2048, WIDTH, device="zsim", dtype=torch.bfloat16)
        loss: Any = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(
    json.dumps(
        {
            "findings": len(tape.findings),
            "operations": tape.operation_count,
            "cpu_s": time.process_time(),
            "resident_bytes": peak_bytes(),
        }
    )
)
