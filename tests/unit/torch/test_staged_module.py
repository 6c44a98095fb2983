"""A module of the user's own in stages of a pipeline: units of a Sequential."""

from pathlib import Path

import pytest
import torch
from plain_net import Loss
from shared_ranks import SharedPools
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.nanotron.options import Nanotron
from zsim_torch.module.initializer import Initializer
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

STRATEGY = Strategy(
    parallel=Parallel(pipeline=2),
    zero=Zero(stage=0, emulate=Nanotron()),
    train=Train(gradient_accumulation_steps=3, optimizer=SGD(learning_rate=0.5)),
)
ALONE = STRATEGY.but({"parallel": Parallel()})
STEPS = 2


def module() -> nn.Sequential:
    """Units of which the second stage takes a tensor of three dimensions, and has buffers."""
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3)), Loss())


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, 3, 4, generator=generator) for _ in range(3)]


def in_stages(
    folder: Path,
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train on this rank: mean losses, those of evaluations, state at the end, and from a load."""
    own = module()
    losses: list[float] = []
    evaluated: list[float] = []
    with Trainer(own, STRATEGY, batch=batches(0)[0]) as trainer:
        for step in range(STEPS):
            losses.append(trainer.average(trainer.step(*batches(step))))
            evaluated.append(trainer.average(trainer.evaluate(*batches(9)[:2])))
        with pytest.raises(RefusedError, match=r"number 0 has tensors of shapes \(\(1, 3, 4\),\)"):
            trainer.evaluate(torch.zeros(1, 3, 4))
        trainer.save(folder)
    again = module()
    with Trainer(again, STRATEGY, batch=batches(0)[0]) as trainer:
        trainer.load(folder)
    return losses, evaluated, dict(own.state_dict()), dict(again.state_dict())


def loss_of(plain: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = plain[-1](plain[:-1](batch), batch)
    return made


@pytest.mark.one_commit_in(6)
def test_a_sequence_of_units_trains_and_is_saved_in_two_stages_as_in_one_process(
    pool_of: SharedPools,
    tmp_path: Path,
) -> None:
    plain = module()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected: list[float] = []
    expected_later: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for each in batches(step):
            loss = loss_of(plain, each)
            (loss / 3).backward()  # type: ignore[no-untyped-call]  # torch has no types here
            total += float(loss.detach()) / 3
        optimizer.step()
        expected.append(total)
        plain.eval()
        with torch.no_grad():
            later = [float(loss_of(plain, each)) for each in batches(9)[:2]]
        plain.train()
        expected_later.append(sum(later) / 2)
    pool = pool_of(2)
    found = pool.run(in_stages, tmp_path)
    for losses, evaluated, state, loaded in found:
        assert losses == pytest.approx(expected, rel=1e-6)
        assert evaluated == pytest.approx(expected_later, rel=1e-6)
        # Statistics of the second stage's norm are on every rank in the end, and in the checkpoint.
        assert state.keys() == loaded.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
            assert torch.equal(loaded[name], state[name]), name
    alone = module()
    with Trainer(alone, ALONE, batch=batches(0)[0]) as trainer:
        trainer.load(tmp_path)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, found[0][2][name]), name


def from_nothing(
    strategy: Strategy, folder: Path | None
) -> tuple[float, dict[str, torch.Tensor], set[str]]:
    """Train a module on "meta" whose values are made or stored; also which parameters were made."""
    with torch.device("meta"):
        own = module()
    made: set[str] = set()
    initializer = Initializer(seed=3, stored=folder)
    with Trainer(own, strategy, batch=batches(0)[0], option=Option(initial=initializer)) as trainer:
        for buffer in trainer.run.program.persistent:
            layout = trainer.run.program.by_name[buffer].layout
            if layout is not None:
                made |= {
                    piece.parameter for piece in trainer.schedule.layout_by_name[layout].pieces
                }
        loss = trainer.average(trainer.step(*batches(0)))
        return loss, trainer.full_parameters(), made


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stored", [False, True])
def test_a_module_on_meta_starts_in_stages_with_the_values_of_one_process(
    pool_of: SharedPools, tmp_path: Path, stored: bool
) -> None:
    folder = tmp_path if stored else None
    if stored:
        with Trainer(module(), ALONE, batch=batches(0)[0]) as trainer:
            trainer.save(tmp_path)
    loss, parameters, everything = from_nothing(ALONE, folder)
    pool = pool_of(2)
    found = pool.run(from_nothing, STRATEGY, folder)
    for rank_loss, values, made in found:
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert made < everything
        for name, value in parameters.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
    assert found[0][2] | found[1][2] == everything
    assert not found[0][2] & found[1][2]


def test_a_tensor_axis_of_a_module_of_ones_own_is_refused() -> None:
    strategy = Strategy(parallel=Parallel(tensor=2), zero=Zero(stage=0))
    with pytest.raises(RefusedError) as caught:
        Trainer(module(), strategy, batch=batches(0)[0])
    assert str(caught.value) == (
        "parallel.tensor: 2 must be 1 for a module of your own, whose matrices nothing cuts"
    )
