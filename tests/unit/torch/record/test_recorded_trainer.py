"""zsim's own trainer in a recording, as a script of its users has it."""

from collections.abc import Callable, Iterable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_record import recording
from zsim_record.record.tape import Tape
from zsim_torch.module.module_state import SharedBuffers
from zsim_torch.trainer import Trainer

WORLD = 4


class Block(nn.Module):
    """Statistics that a kernel writes in place, and others that forward puts in their place."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.linear(value)
        if self.training:
            self.mean = self.mean * 0.9 + made.detach().mean(0) * 0.1
        normed: torch.Tensor = self.norm(made - self.mean)
        return normed


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, value: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        del batch
        loss: torch.Tensor = self.linear(value).square().mean()
        return loss


def batch(device: str) -> torch.Tensor:
    return torch.randn(4, 8, device=device)


def trained(stage: int, device: str, *, cuda: bool = True) -> Tape:
    """Record a training with an evaluation; a module of the CPU moves for its duration."""
    with recording(world=WORLD, cuda=cuda) as tape:
        dist.init_process_group("nccl")
        module = nn.Sequential(Block(), Loss()).to(device)
        strategy = Strategy(parallel=Parallel(data=WORLD), zero=Zero(stage=stage))
        with Trainer(module, strategy, batch=batch(device)) as trainer:
            assert trainer.run.device.type == "zsim"
            for _ in range(2):
                trainer.step(batch(device))
            trainer.evaluate(batch(device))
        assert {each.device.type for each in module.buffers()} == {
            "cpu" if device == "cpu" else "zsim"
        }
    return tape


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("stage", "device"), [(0, "cpu"), (2, "cuda"), (3, "cuda")])
def test_a_training_with_batch_norm_has_no_finding(stage: int, device: str) -> None:
    tape = trained(stage, device)
    assert tape.findings == []
    assert tape.refused == {}
    issued = [each.kind for calls in tape.collectives.values() for each in calls]
    assert issued.count("broadcast") >= 2 * 4  # buffers of each step


class KeepingBlock(nn.Module):
    """A block of a forward that is planned; it keeps a tensor from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.kept = torch.zeros(8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.linear(value)
        self.kept = made.detach().mean(0)
        normed: torch.Tensor = self.drop(self.norm(made))
        return normed


class Planned(nn.Module):
    """Repeated blocks, and code between them that reads a tensor and holds a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KeepingBlock() for _ in range(2))
        self.head, self.table = nn.Linear(8, 1), torch.ones(8)
        self.generator = torch.Generator()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value * self.table.to(value.device)
        for layer in self.layers:
            value = layer(value)
        loss: torch.Tensor = self.head(value).square().mean()
        return loss


@pytest.mark.matrix(6)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_module_that_is_planned_trains_in_a_recording_and_no_answer_is_invented(
    device: str,
) -> None:
    with recording(world=WORLD, cuda=True) as tape:
        dist.init_process_group("nccl")
        module = Planned().to(device)
        strategy = Strategy(parallel=Parallel(data=WORLD), zero=Zero(stage=2))
        with Trainer(module, strategy, batch=batch(device)) as trainer:
            trainer.step(batch(device))
    assert tape.findings == []
    assert tape.refused == {}
    assert tape.invented == {}


def test_whole_numbers_of_the_cpu_are_compared_in_a_recording() -> None:
    with recording(world=WORLD) as tape:
        one, other = torch.tensor([1, 2]), torch.tensor([1, 3])
        assert not torch.equal(one, other)
        assert torch.equal(one, one.clone())
        assert tape.invented == {}
        assert torch.equal(torch.zeros(2), torch.ones(2))
    assert len(tape.invented) == 1


@pytest.mark.one_commit_in(6)
def test_buffers_that_are_shared_without_a_wait_are_found() -> None:
    share = SharedBuffers.share

    def without_wait(
        buffers: SharedBuffers,
        _: Callable[[Iterable[torch.Tensor]], object],
        *group: int | dist.ProcessGroup,
    ) -> None:
        share(buffers, lambda _: None, *group)  # type: ignore[arg-type]

    with patch.object(SharedBuffers, "share", without_wait):
        tape = trained(2, "cuda")
    assert any(
        hazard.kind.value == "race" and hazard.later.operation == "broadcast"
        for hazard in tape.findings
    )


def test_a_recording_without_the_streams_of_cuda_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"device: zsim is recorded .* say zsim record --cuda"):
        trained(2, "zsim", cuda=False)
