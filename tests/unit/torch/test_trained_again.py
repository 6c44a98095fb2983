"""A module that is given to `train` a second time: nothing of the first run is lost unsaid."""

import copy

import pytest
import torch
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_torch.module.description import describe
from zsim_torch.train import Option, Trained, train

UNITS = ("0", "1", "2")
ADAM = Strategy(
    zero=Zero(stage=2), train=Train(precision=Precision.FP32, optimizer=Adam(learning_rate=0.1))
)
PLAIN = ADAM.but({"train.optimizer": SGD(learning_rate=0.1)})


class Loss(nn.Module):
    def forward(self, value: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return value.float().square().mean()


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), Loss()).to(dtype)


def batches(start: int, steps: int) -> list[torch.Tensor]:
    numbers = torch.randint(0, 5, (start + steps, 6), generator=torch.Generator().manual_seed(5))
    return list(numbers[start:])


def scheduled(strategy: Strategy) -> Schedule:
    return make_schedule(
        describe(net(), UNITS, batches(0, 1)[0], precision=strategy.train.precision), strategy
    )


def trained(
    module: nn.Module, strategy: Strategy, start: int, steps: int, option: Option | None = None
) -> Trained:
    data = batches(start, steps)
    return train(module, UNITS, scheduled(strategy), data, steps=steps, option=option)


def parameters(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_a_second_run_with_adam_is_refused_and_changes_nothing() -> None:
    module = net()
    trained(module, ADAM, 0, 2)
    before = parameters(module)
    with pytest.raises(RefusedError) as caught:
        trained(module, ADAM, 2, 2)
    assert str(caught.value) == (
        "module: an earlier run trained it, and its optimizer's moments and step would begin anew; "
        "train once with more steps, or say Option(restart=True)"
    )
    assert torch.equal(parameters(module), before)


def test_a_second_run_that_says_restart_begins_anew() -> None:
    module, other = net(), net()
    trained(module, ADAM, 0, 2)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), module.parameters(), strict=True):
            mine.copy_(its)
    trained(module, ADAM, 2, 2, Option(restart=True))
    trained(other, ADAM, 2, 2)
    assert torch.equal(parameters(module), parameters(other))


def test_a_wrapper_of_trained_parameters_is_refused_as_they_are() -> None:
    module = net()
    trained(module, ADAM, 0, 1)
    with pytest.raises(RefusedError, match="its optimizer's moments and step would"):
        trained(nn.Sequential(*module.children()), ADAM, 1, 1)


def test_a_copy_of_a_trained_module_is_a_module_of_its_own() -> None:
    module = net()
    trained(module, ADAM, 0, 1)
    trained(copy.deepcopy(module), ADAM, 1, 1)


@pytest.mark.one_commit_in(6)
def test_plain_sgd_goes_on_where_it_was() -> None:
    twice, once = net(), net()
    trained(twice, PLAIN, 0, 2)
    trained(twice, PLAIN, 2, 2)
    trained(once, PLAIN, 0, 4)
    assert torch.equal(parameters(twice), parameters(once))


def test_another_optimizer_begins_as_it_would_on_any_module() -> None:
    module = net()
    trained(module, PLAIN, 0, 1)
    trained(module, ADAM, 1, 1)
    trained(module, PLAIN, 2, 1)


def test_a_loss_scale_that_moved_is_state_too() -> None:
    scaled = PLAIN.but(
        {"train.precision": Precision.FP16, "train.loss_scale": LossScale(initial=4.0, interval=1)}
    )
    module = net()
    assert trained(module, scaled, 0, 2).scalars["loss_scale"] == 16.0
    with pytest.raises(RefusedError, match="its loss_scale would begin anew;"):
        trained(module, scaled, 2, 1)


def test_masters_that_the_module_cannot_hold_are_state_too() -> None:
    in_bf16 = PLAIN.but({"train.precision": Precision.BF16})
    module = net()
    trained(module, in_bf16, 0, 1)
    trained(module, in_bf16, 1, 1)  # an fp32 module holds fp32 masters
    narrow = net(torch.bfloat16)
    first = trained(narrow, in_bf16, 0, 1)
    with pytest.raises(RefusedError, match="its fp32 masters would begin anew;"):
        trained(narrow, in_bf16, 1, 1)
    trained(narrow, in_bf16, 1, 1, Option(initial=first.full_parameters().__getitem__))


def test_a_run_that_raised_left_nothing() -> None:
    module = net()
    with pytest.raises(RuntimeError, match="batches: they ended"):
        train(module, UNITS, scheduled(ADAM), batches(0, 0), steps=1)
    trained(module, ADAM, 0, 2)


def test_a_module_without_parameters_is_refused_unless_they_are_given() -> None:
    module = net()
    first = trained(module, PLAIN, 0, 1, Option(write_back=False))
    with pytest.raises(RefusedError) as caught:
        trained(module, PLAIN, 1, 1)
    assert str(caught.value) == (
        "module: an earlier run with write_back=False, or one that failed, left it no parameters, "
        "and `initial` is not given"
    )
    trained(module, PLAIN, 1, 1, Option(initial=first.full_parameters().__getitem__))
