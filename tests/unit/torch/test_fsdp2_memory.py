"""What the emulated FSDP2 says that it holds, and what PyTorch's own holds on real ranks."""

from dataclasses import dataclass, replace

import pytest
import torch
from fully_sharded import sharded
from live_storages import LiveStorages
from shared_ranks import SharedPools
from torch import nn

from zsim.memory import memory_ledger
from zsim.memory.caching import CachingAllocator
from zsim.memory.service import Service
from zsim.model.architecture import GPT
from zsim.model.transformer import transformer as described_transformer
from zsim.runtimes.registry import make_schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_torch.module.description import describe
from zsim_torch.module.transformer import transformer

RANKS = 4
STEPS = 3  # a transport's thread may hold a tensor a moment longer; it does not in every step
SHAPE = GPT(
    layers=4,
    hidden_size=128,
    attention_heads=4,
    sequence_length=16,
    vocab_size=96,
    tied_embeddings=False,
)


@dataclass(frozen=True, slots=True)
class Run:
    """What to train and how."""

    sequences: int
    options: FSDP2

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        size = (self.sequences, SHAPE.sequence_length + 1)
        return torch.randint(0, SHAPE.vocab_size, size, generator=generator)


def blocks(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children() if name.startswith("block")]


def measured(run: Run) -> int:
    """Peak of live storages on this rank: the least of the steps after the first."""
    strategy = Strategy(parallel=Parallel(data=RANKS), zero=Zero(stage=3, emulate=run.options))
    module = transformer(SHAPE)
    root = sharded(module, blocks(module), strategy, run.options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    batch = run.batch()
    peaks: list[int] = []
    with LiveStorages() as live:
        for _ in range(STEPS):
            live.peak = 0
            loss = module(batch)
            torch.autograd.backward(loss)
            del loss
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(live.peak)
    assert isinstance(root, nn.Module)
    return min(peaks[1:])


def emulated(run: Run) -> int:
    """Peak of the book that the schedule promises."""
    module = transformer(SHAPE)
    described = describe(module, module.units, run.batch())
    model = replace(
        described,
        units=tuple(
            replace(unit, checkpoint=unit.name in blocks(module)) for unit in described.units
        ),
    )
    strategy = Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(stage=3, emulate=run.options),
        train=Train(optimizer=Adam()),
    )
    ((_, _, peak),) = make_schedule(model, strategy).contract.peak_bytes
    return peak


def by_tensors(run: Run) -> int:
    """Peak of what an allocator is asked for, tensor by tensor."""
    model = described_transformer(SHAPE, micro_batch_size=run.sequences)
    strategy = Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(stage=3, emulate=run.options),
        train=Train(optimizer=Adam()),
    )
    (program,) = make_schedule(model, strategy).programs
    allocator = CachingAllocator()
    entries = memory_ledger(program, STEPS)
    lines = list(Service(allocator, program, "device").course(entries))
    assert len(lines) == len(entries)
    return allocator.figures()["requested_bytes.all.peak"]


BOUNDS = {
    Run(1, FSDP2(reshard_after_forward=True)): 0.02,
    Run(1, FSDP2(reshard_after_forward=False)): 0.001,
    Run(1, FSDP2(reshard_after_forward=2)): 0.02,
    Run(4, FSDP2(reshard_after_forward=True)): 0.05,
    Run(4, FSDP2(reshard_after_forward=False)): 0.001,
}


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    "run", BOUNDS, ids=lambda run: f"{run.sequences}-{run.options.reshard_after_forward}"
)
def test_the_book_and_its_tensors_are_what_lives_in_fully_shard(
    pool_of: SharedPools, run: Run
) -> None:
    """With more tokens backward of a block frees what it saved while it makes gradients.

    The book has all of both: its operations are as long as a segment. Tensors do not.
    """
    lives = min(pool_of(RANKS).run(measured, run))
    assert emulated(run) == pytest.approx(lives, rel=BOUNDS[run])
    assert by_tensors(run) == pytest.approx(lives, rel=0.005)


def test_runs_differ_in_their_peaks() -> None:
    assert len({by_tensors(run) for run in BOUNDS}) == len(BOUNDS)
