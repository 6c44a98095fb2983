"""Rates and constants of an optimizer in a checkpoint: taken together, or refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from plain_net import batch, in_fp64, net
from torch import nn

from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.trainer import Trainer


def adam(
    module: nn.Module,
    *,
    turned: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> torch.optim.Optimizer:
    """Make an optimizer with a group for each parameter."""
    groups = [{"params": [each]} for each in module.parameters()]
    return torch.optim.AdamW(
        groups[::-1] if turned else groups,
        lr=0.01,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
    )


CHANGED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "betas": (
        lambda module: adam(module, betas=(0.5, 0.6)),
        "betas of group 0 is (0.9, 0.999) there, (0.5, 0.6) here",
    ),
    "eps": (lambda module: adam(module, eps=1e-3), "eps of group 0 is 1e-08 there, 0.001 here"),
    "weight_decay": (
        lambda module: adam(module, weight_decay=0.5),
        "weight_decay of group 0 is 0.01 there, 0.5 here",
    ),
    "one group": (
        lambda module: torch.optim.AdamW(module.parameters()),
        "parameters of group 0 are in groups 0 and 1 and 2 and 3 there",
    ),
    "plain SGD": (
        lambda module: torch.optim.SGD([{"params": [each]} for each in module.parameters()]),
        "betas of group 0 is (0.9, 0.999) there, None here",
    ),
}


def begun(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Trainer:
    module = net()
    return Trainer(module, in_fp64(), batch=batch(0), optimizer=make(module))


@pytest.mark.parametrize("name", CHANGED)
def test_rates_of_a_checkpoint_are_never_mixed_with_other_constants(
    tmp_path: Path, name: str
) -> None:
    make, why = CHANGED[name]
    with begun(adam) as one:
        assert one.optimizer is not None
        one.step(batch(0))
        one.optimizer.param_groups[1]["lr"] = 0.25
        one.save(tmp_path)
    with begun(make) as other:
        assert other.optimizer is not None
        before, rates = other.full_parameters(), dict(other.optimizer.param_groups[0])
        with pytest.raises(CheckpointError) as caught:
            other.load(tmp_path)
        assert str(caught.value).startswith(f"checkpoint {tmp_path}: optimizer: {why}; ")
        for key, value in other.full_parameters().items():
            assert torch.equal(value, before[key])
        other.load(tmp_path, keep_groups=True)
        assert other.optimizer.param_groups[0] == rates
        assert other.steps_done == 1


def test_rates_of_a_checkpoint_find_their_parameters_in_another_order(tmp_path: Path) -> None:
    with begun(adam) as one:
        assert one.optimizer is not None
        for number, group in enumerate(one.optimizer.param_groups):
            group["lr"] = group["initial_lr"] = number / 8
        one.save(tmp_path)
    with begun(partial(adam, turned=True)) as other:
        other.load(tmp_path)
        assert other.optimizer is not None
        found = [group["lr"] for group in other.optimizer.param_groups]
    assert found == [number / 8 for number in reversed(range(4))]
