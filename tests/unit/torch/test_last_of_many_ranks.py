"""The last of 8,192 ranks in this process alone: what lives and what is sent are as promised.

`torch.distributed`'s process group "fake" takes collectives and does nothing, so no value is
judged here; memory and volume are those that the rank really has.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.feed import feed
from zsim_torch.module.absent import emptied
from zsim_torch.module.transformer import initial_value, transformer
from zsim_torch.module.unit import resolve
from zsim_torch.observe.observer import Observer
from zsim_torch.rank_result import observed_by

RANKS = 8192
SHAPE = GPT(layers=2, hidden_size=32, attention_heads=2, sequence_length=8, vocab_size=256)
STEPS = 2


@pytest.fixture(scope="module")
def fake_ranks() -> Iterator[int]:
    """Be the last rank."""
    distributed.init_process_group("fake", rank=RANKS - 1, world_size=RANKS, store=FakeStore())
    yield RANKS - 1
    distributed.destroy_process_group()


def job(stage: int) -> Job:
    strategy = Strategy.of(
        {
            "parallel.data": RANKS,
            "zero.stage": stage,
            "zero.bucket_elements": 10_000,
            "train.gradient_accumulation_steps": 2,
            "train.clip_norm": 1.0,
        }
    )
    model = gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision)
    link = Link(bytes_per_s=1)
    gpu = Gpu(name="none", memory_bytes=1, memory_bytes_per_s=1, rates=())
    cluster = Cluster(
        name="none",
        nodes=RANKS,
        gpus_per_node=1,
        gpu=gpu,
        switch_link=link,
        nics_per_node=1,
        nic_link=link,
    )
    schedule = make_schedule(model, strategy)
    return Job(schedule=schedule, model=model, cluster=cluster, steps=STEPS)


def run(made: Job, rank: int) -> dict[str, float]:
    """Run setup and steps of one rank; return what was observed of the steps."""
    schedule, device = made.schedule, torch.device("cpu")
    program = schedule.program_of(rank)
    sizes = {each.name: each.shape for each in made.model.parameters}
    module = transformer(SHAPE, seed=None)
    batches, observer = feed(made, rank, data=None, seed=0), Observer(None)
    pools = HostPools(schedule, program, folder=Path(gettempdir()), device=device, poison=False)
    bench = Bench(schedule, program, rank=rank, device=device, observer=observer, pools=pools)
    with emptied(module, keep=False), bench, observer:
        executor: Executor = bench.executor(
            resolve(module, module.units),
            initial=lambda name: initial_value(SHAPE, name, sizes[name], seed=0),
            next_batch=lambda: next(batches),
            on_loss=lambda _: None,
            on_norm=lambda *_: None,
            poison=Poison(None),
        )
        executor.run_setup()
        observer.traffic.clear()
        for step in range(STEPS):
            executor.run_step(step, {})
        return dict(observed_by(bench, executor))


def promised(schedule: Schedule) -> dict[str, float]:
    """Bytes of all steps by group and kind, by the closed form."""
    assert schedule.contract.wire_bytes is not None
    return {
        f"{'scalar_wire' if each.scalar else 'wire'}_bytes/{each.group}/{each.collective}": (
            STEPS * each.bytes
        )
        for each in schedule.contract.wire_bytes
        if each.bytes
    }


@pytest.mark.matrix(12)
@pytest.mark.parametrize("stage", range(4))
def test_live_memory_and_volume_are_those_of_ledger_and_closed_form(
    fake_ranks: int, stage: int
) -> None:
    made = job(stage)
    observed = run(made, fake_ranks)
    booked = observed["booked_bytes_peak/state"] + observed["shared_bytes_peak/gradient"]
    assert observed["live_bytes_peak/state"] == booked
    sent = {name: size for name, size in observed.items() if "wire_bytes" in name and size}
    assert sent == promised(made.schedule)
