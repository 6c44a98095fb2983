"""zsim's own executor on the streams of the pretended device: its code for CUDA, unchanged."""

from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist

from zsim.backend.backend import Job
from zsim_torch import recording
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.host_workers import HostWorkers, worker_streams
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.feed import feed
from zsim_torch.module.transformer import initial_value, transformer
from zsim_torch.module.unit import resolve
from zsim_torch.record.tape import Tape
from zsim_torch.run_option import given_by_strategy


def recorded(job: Job, *, rank: int = 0) -> Tape:
    """Record setup and steps of `job` on one rank."""
    shape = job.model.architecture
    assert shape is not None
    schedule = job.schedule
    program = schedule.program_of(rank)
    sizes = {parameter.name: parameter.shape for parameter in job.model.parameters}
    with recording(world=schedule.mesh.size, rank=rank, cuda=True) as tape:
        dist.init_process_group("nccl")
        device = torch.device("cuda", 0)
        module = transformer(shape, seed=None)
        batches = feed(job, rank, data=None, seed=0)
        pools = HostPools(schedule, program, folder=Path(gettempdir()), device=device, poison=False)
        bench = Bench(schedule, program, rank=rank, device=device, observer=None, pools=pools)
        workers = HostWorkers(worker_streams(schedule, program))
        bench.streams = CudaStreams(device, schedule.streams, workers)  # as for a "cuda" device
        with bench:
            executor = bench.executor(
                resolve(module, module.units),
                initial=lambda name: initial_value(shape, name, sizes[name], seed=0),
                next_batch=lambda: next(batches).long().to(device, non_blocking=True),
                on_loss=lambda _: None,
                on_norm=lambda *_: None,
                poison=Poison(None),
            )
            given = given_by_strategy(schedule)
            executor.run_setup()
            for step in range(job.steps):
                executor.run_step(step, {name: at(step) for name, at in given.items()})
            executor.machine.streams.drain()
    return tape
