"""FSDP2 recorded and lifted, beside zsim's emulation of the same training."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zsim.backend.backend import Job
from zsim.files.installed import topology
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_record import recording
from zsim_record.lift.lifted_schedule import document
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_torch.module.transformer import transformer

WORLD = 4
SHAPE = GPT(
    layers=4,
    hidden_size=256,
    attention_heads=4,
    sequence_length=128,
    vocab_size=256,
    tied_embeddings=False,
)


@dataclass(frozen=True, slots=True)
class BothJobs:
    """One training as zsim schedules it, and as it was recorded."""

    emulated: Job
    lifted: Job


def both_jobs(*, reshard: bool | None, replicas: int = 1) -> BothJobs:
    """Return both for a GPT, with or without resharding, in so many replicas of shards."""
    options = FSDP2() if reshard is None else FSDP2(reshard_after_forward=reshard)
    strategy = Strategy(
        parallel=Parallel(data=WORLD // replicas, replicate=replicas),
        zero=Zero(stage=3, emulate=options),
    )
    model = gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision)
    cluster = topology("dgx_h100_infiniband", None, 1)
    emulated = make_schedule(model, strategy)
    with recording(world=WORLD, lifts=True) as tape:
        _train(reshard, replicas)
    assert tape.findings == []
    found = document(tape.schedule())
    assert found.model is not None
    return BothJobs(
        Job(schedule=emulated, model=model, cluster=cluster, steps=3),
        Job(schedule=found.schedule, model=found.model, cluster=cluster, steps=3),
    )


def _train(reshard: bool | None, replicas: int) -> None:
    dist.init_process_group("nccl")
    shape = (WORLD,) if replicas == 1 else (replicas, WORLD // replicas)
    mesh = init_device_mesh("zsim", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    module = transformer(SHAPE, seed=None).to_empty(device="zsim")
    for name in module.units:
        if name.startswith("block"):
            block = module.get_submodule(name)
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh)
    # Fused, as zsim takes updates to be: one of foreach holds temporary tensors.
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for _ in range(3):
        batch = torch.randint(SHAPE.vocab_size, (1, SHAPE.sequence_length + 1), device="zsim")
        loss = module(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss, batch
