"""Units in a row whose parameters stay in memory: one graph of autograd, the bits of each alone."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch import Trainer
from zsim_torch.module.autograd import LINKS
from zsim_torch.module.unit import UnitRunError

SIZE = 6
How = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Linear(nn.Module):
    """A product, and what a test makes of it and of what came in."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.how = how

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.how(value, self.linear(value))


class Loss(nn.Module):
    def forward(self, value: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return value.square().mean()


class SumLoss(nn.Module):
    def forward(self, value: torch.Tensor, other: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return (value + other).square().mean()


def residual(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return value + made.tanh()


def view(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return (value * made.sigmoid()).flip(0)[...]


def strategy(stage: int, checkpointing: Checkpointing = Checkpointing.NONE) -> Strategy:
    return Strategy(
        zero=Zero(stage=stage, bucket_elements=100),
        activations=Activations(checkpointing=checkpointing),
        train=Train(precision=Precision.FP64, optimizer=Adam(learning_rate=0.05)),
    )


def stack(*how: How) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(Linear(each) for each in how), Loss()).double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, SIZE, generator=generator, dtype=torch.float64)


def trained(chosen: Strategy, *how: How, steps: int = 5) -> list[torch.Tensor]:
    """Losses and parameters of a training."""
    module = stack(*how)
    with Trainer(module, chosen, batch=batch(0)) as trainer:
        losses = [trainer.step(batch(step)) for step in range(steps)]
    return [*losses, *(each.detach() for each in module.parameters())]


def in_a_plain_loop(*how: How, steps: int = 5) -> list[torch.Tensor]:
    module = stack(*how)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.0)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss: torch.Tensor = module(batch(step).clone())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(each.detach() for each in module.parameters())]


@pytest.mark.parametrize("count", [2, LINKS - 1, LINKS, LINKS + 1, 2 * LINKS + 1])
def test_units_in_a_row_have_the_bits_of_units_that_are_gathered(count: int) -> None:
    how = [residual, view] * count
    kept, gathered = trained(strategy(0), *how[:count]), trained(strategy(3), *how[:count])
    assert all(torch.equal(one, other) for one, other in zip(kept, gathered, strict=True))


@pytest.mark.parametrize("how", [residual, view])
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_they_train_as_in_a_plain_loop(how: How, checkpointing: Checkpointing) -> None:
    hows = (residual, how, residual, residual)
    found, wanted = trained(strategy(0, checkpointing), *hows), in_a_plain_loop(*hows)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_second_output_of_the_node_that_is_read_past_the_inputs_is_found() -> None:
    left: list[torch.Tensor] = []
    calls = [0]

    def leaving(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        one, other = torch.cat([made, value]).chunk(2)
        left[:] = [other]
        return one

    def taking(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return value + made + (left[0] if calls[0] > 4 else 0.0)

    with pytest.raises(UnitRunError, match=r"^unit 2: its forward reads what another forward"):
        trained(strategy(0), residual, leaving, taking, steps=8)


@pytest.mark.parametrize("start", [2, 8, 17])
def test_what_is_read_past_the_inputs_from_some_step_on_is_found_at_once(start: int) -> None:
    left: list[torch.Tensor] = []
    seen: list[int] = []

    def leaving(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        left[:] = [made * 2.0]
        return value + made

    def taking(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        seen.append(len(seen))
        return value + made + (left[0] if len(seen) > start + 1 else 0.0)

    with pytest.raises(UnitRunError, match=r"^unit 1: its forward reads what another forward"):
        trained(strategy(0), leaving, taking, steps=start + 3)
    assert len(seen) == start + 2


def test_no_history_outlives_its_step() -> None:
    module = stack(residual, residual, residual)
    with Trainer(module, strategy(0), batch=batch(0)) as trainer:
        for step in range(3):
            trainer.step(batch(step))
            links = trainer.run.machine.computer._links  # pyright: ignore[reportPrivateUsage]
            assert not links


def test_a_value_that_two_units_read_gets_both_gradients() -> None:
    results: list[list[torch.Tensor]] = []
    for stage in (0, 3):
        module = stack(residual, residual, residual)
        units = [*"012", ("head", SumLoss())]
        reads = {"head": ["2", "0"]}
        with Trainer(module, strategy(stage), units=units, batch=batch(0), reads=reads) as trainer:
            losses = [trainer.step(batch(step)) for step in range(5)]
        results.append([*losses, *(each.detach() for each in module.parameters())])
    kept, gathered = results
    assert all(torch.equal(one, other) for one, other in zip(kept, gathered, strict=True))
