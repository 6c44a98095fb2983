"""A module of the user's own in stages of a pipeline: units of a Sequential."""

import pytest
import torch
from plain_net import Loss
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.runtimes.nanotron.options import Nanotron
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.trainer import Trainer

STRATEGY = Strategy(
    parallel=Parallel(pipeline=2),
    zero=Zero(stage=0, emulate=Nanotron()),
    train=Train(gradient_accumulation_steps=3, optimizer=SGD(learning_rate=0.5)),
)
STEPS = 2


def module() -> nn.Sequential:
    """Units of which the second stage takes a tensor of three dimensions."""
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5))
    return nn.Sequential(*blocks, Loss())


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, 3, 4, generator=generator) for _ in range(3)]


def in_stages() -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Train on this rank: mean losses, the module's parameters, and what is refused."""
    own = module()
    losses: list[float] = []
    with Trainer(own, STRATEGY, batch=batches(0)[0]) as trainer:
        for step in range(STEPS):
            losses.append(trainer.average(trainer.step(*batches(step))))
        refused: list[str] = []
        for wrong in (lambda: trainer.evaluate(batches(0)[0]), trainer.state_dict):
            with pytest.raises(RefusedError) as caught:
                wrong()
            refused.append(str(caught.value))
    return losses, {name: each.detach() for name, each in own.named_parameters()}, refused


def test_a_sequence_of_units_trains_in_two_stages_as_in_one_process() -> None:
    plain = module()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for each in batches(step):
            loss = plain[:-1](each)
            loss = plain[-1](loss, each)
            (loss / 3).backward()
            total += float(loss.detach()) / 3
        optimizer.step()
        expected.append(total)
    with RankPool(2) as pool:
        for losses, parameters, refused in pool.run(in_stages):
            assert losses == pytest.approx(expected, rel=1e-6)
            for name, value in plain.named_parameters():
                torch.testing.assert_close(parameters[name], value.detach(), rtol=0, atol=1e-7)
            assert refused == [
                "parallel.pipeline: 2 must be 1 to evaluate; full_parameters() has every stage's "
                "parameters",
                "parallel.pipeline: 2 must be 1 to save and load; full_parameters() has every "
                "stage's parameters",
            ]


def test_a_tensor_axis_of_a_module_of_ones_own_is_refused() -> None:
    strategy = Strategy(parallel=Parallel(tensor=2), zero=Zero(stage=0))
    with pytest.raises(RefusedError) as caught:
        Trainer(module(), strategy, batch=batches(0)[0])
    assert str(caught.value) == (
        "parallel.tensor: 2 must be 1 for a module of your own, whose matrices nothing cuts"
    )
