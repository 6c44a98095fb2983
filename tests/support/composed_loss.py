"""Bytes that PyTorch's loss over parts of a vocabulary holds at once, as JSON.

A process of its own: it has a process group that does nothing.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from live_storages import LiveStorages
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, TOKENS, VOCABULARY = 2, 32, 4096

LOG_SOFTMAX: Any = vars(loss)["_log_softmax"]
BACKWARD: Any = vars(loss)["_nll_loss_and_log_softmax_backward"]
"""Functions that `loss_parallel` runs on the tensors of a rank."""


def main() -> None:
    """Print the most that forward holds of given logits on, and backward of what that has kept."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    live = LiveStorages()
    with live:
        logits = torch.randn(TOKENS, VOCABULARY // RANKS)
        live.peak = 0
        kept = LOG_SOFTMAX(logits, 1, half_to_float=False, mesh=mesh, mesh_dim=0)
        forward = live.peak
        del logits
        live.peak = 0
        BACKWARD(
            torch.tensor(1.0),
            kept,
            targets,
            weight=None,
            reduction=1,  # the mean
            ignore_index=-100,
            total_weight=torch.tensor(float(TOKENS)),
            input_shape=torch.Size([TOKENS, VOCABULARY]),
            channel_dim=1,
            mesh=mesh,
            mesh_dim=0,
        )
    sys.stdout.write(json.dumps({"forward": forward, "backward": live.peak}) + "\n")


if __name__ == "__main__":
    main()
