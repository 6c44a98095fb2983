"""A small module, its data, and torch's own loop that trains it."""

from collections.abc import Iterator

import torch
from torch import nn

from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero

STAGE_2 = Strategy(zero=Zero(stage=2, bucket_elements=60))


class Loss(nn.Module):
    """The last unit."""

    def forward(self, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return value.square().mean()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), Loss()).double()


def batch(step: int) -> torch.Tensor:
    made = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    return made.double()


def in_fp64(strategy: Strategy = STAGE_2, **train_changes: object) -> Strategy:
    changes = {f"train.{key}": value for key, value in train_changes.items()}
    return strategy.but({"train.precision": Precision.FP64, **changes})


def plain_steps(
    module: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None
) -> Iterator[tuple[float, float]]:
    """Torch's own loop: the loss and the norm of each step."""
    for step in range(steps):
        optimizer.zero_grad()
        loss = module[3](module[:3](batch(step)), batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), clip or 1e9)
        optimizer.step()
        yield float(loss.detach()), float(norm)


def assert_equal_parameters(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
