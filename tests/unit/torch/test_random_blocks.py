"""Blocks that draw from Python's `random` or from numpy: as in torch's loop, or refused by name."""

import random  # noqa: TID251  (what modules of users draw from)
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from zsim.strategy.strategy import Strategy
from zsim_torch import Trainer
from zsim_torch.module.unit import ModuleUnitError, UnitRunError

WIDTH, STEPS = 4, 3
Draw = Callable[[], float]


class Block(nn.Module):
    """A layer whose result is scaled by what is drawn, or left out by chance."""

    def __init__(self, draw: Draw, *, skips: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.draw, self.skips = draw, skips

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        drawn = self.draw()
        if self.skips:
            return hidden if drawn < 0.5 else hidden + self.layer(hidden)
        made: torch.Tensor = hidden + drawn * torch.tanh(self.layer(hidden))
        return made


class Net(nn.Module):
    """Blocks between a layer and the loss."""

    def __init__(self, draw: Draw, *, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(draw, skips=skips) for _ in range(4)])
        self.double()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(hidden)
        loss: torch.Tensor = hidden.square().mean()
        return loss


def strategy(checkpointing: str) -> Strategy:
    return Strategy.of(
        {
            "zero.stage": 3,
            "train.precision": "fp64",
            "activations.checkpointing": checkpointing,
        }
    )


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def of_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002  (what users' modules call)


def seeded() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  (the state that users' modules draw from)


def by_trainer(draw: Draw, checkpointing: str, *, skips: bool = False) -> list[float]:
    module = Net(draw, skips=skips)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    seeded()
    with Trainer(module, strategy(checkpointing), batch=batch(0), optimizer=optimizer) as trainer:
        return [float(trainer.step(batch(step))) for step in range(STEPS)]


def by_torch(draw: Draw) -> list[float]:
    module = Net(draw)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    seeded()
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = module(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_numbers_of_python_are_those_of_a_plain_loop_also_where_blocks_run_again(
    checkpointing: str,
) -> None:
    expected = by_torch(random.random)
    assert by_trainer(random.random, checkpointing) == pytest.approx(expected, rel=1e-9)


def test_numbers_of_numpy_are_those_of_a_plain_loop() -> None:
    assert by_trainer(of_numpy, "none") == pytest.approx(by_torch(of_numpy), rel=1e-9)


def test_a_block_that_runs_again_must_not_draw_from_numpy() -> None:
    with pytest.raises(UnitRunError, match=r"unit blocks\.0: its forward draws from numpy\.random"):
        by_trainer(of_numpy, "full")


def test_a_block_that_was_left_out_by_chance_at_first_must_stay_so() -> None:
    drawn = iter([0.0] * 4)
    told = (
        r"unit blocks\.0: returned a new tensor, the first time its argument 0; only values of "
        r"tensors may change \(does chance decide\? multiply by 0 or 1 instead\)"
    )
    with pytest.raises(ModuleUnitError, match=told):
        by_trainer(lambda: next(drawn, 1.0), "none", skips=True)


def test_to_make_a_trainer_draws_no_number() -> None:
    seeded()
    expected = random.random(), of_numpy()
    for draw in (random.random, of_numpy):
        seeded()
        Trainer(Net(draw), strategy("none"), batch=batch(0)).finish()
        assert (random.random(), of_numpy()) == expected
