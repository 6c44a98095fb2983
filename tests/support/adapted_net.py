"""A small module with adapters (LoRA) beside frozen layers, under a schedule and under FSDP2."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zsim.strategy.strategy import Strategy
from zsim_torch.trainer import Trainer

WIDTH, STEPS = 6, 4
UNITS = ("first", "second", "head")


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank 2 beside it (Hu et al. 2021, figure 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.frozen(value) + self.up(self.down(value))
        return torch.tanh(adapted)


class Head(nn.Module):
    """A frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1).requires_grad_(requires_grad=False)

    def forward(self, value: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.out(value) + first.sum(1, keepdim=True)).square().mean()
        return loss


class AdaptedNet(nn.Module):
    """The first unit is frozen whole; the head reads what it makes, and the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.second = Adapted()
        self.head = Head()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first = self.first(batch)
        loss: torch.Tensor = self.head(self.second(first), first)
        return loss


READS = {"head": ("second", "first")}


def batch(step: int, rank: int) -> torch.Tensor:
    """Return the batch of a rank in a step."""
    generator = torch.Generator().manual_seed(step + 100 * rank)
    return torch.randn(5, WIDTH, generator=generator)


def by_trainer(strategy: Strategy) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by the schedule of `strategy` on this rank."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    module = AdaptedNet()
    with Trainer(module, strategy, units=UNITS, batch=batch(0, 0), reads=READS) as trainer:
        losses = [float(trainer.step(batch(step, rank))) for step in range(STEPS)]
    return losses, {name: each.detach() for name, each in module.named_parameters()}


def by_trainer_all(
    strategies: list[Strategy],
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Train by one after the other."""
    return [by_trainer(strategy) for strategy in strategies]


def by_fsdp() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by PyTorch's fully_shard on this rank."""
    module = AdaptedNet()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for unit in (module.first, module.second, module.head, module):
        fully_shard(unit, mesh=mesh)
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = module(batch(step, distributed.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: each.full_tensor() for name, each in module.state_dict().items()}
