"""Optimizers, learning rates and norms of the trainer: equal to torch's own loop."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from plain_net import assert_equal_parameters, batch, in_fp64, net, plain_steps
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zsim.backend.backend import RefusedError
from zsim.runtimes.registry import make_schedule
from zsim.strategy.learning_rate import Decay, LearningRates
from zsim.strategy.optimizer_rule import LEARNING_RATE, Adam, ParameterGroup
from zsim.strategy.precision import Precision
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.module.description import describe
from zsim_torch.step_metrics import StepMetrics
from zsim_torch.trainer import Trainer

Optimizer = Callable[[nn.Sequential], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1),
    "Adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.02, betas=(0.8, 0.9)),
    "momentum": lambda module: torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "groups": lambda module: torch.optim.AdamW(
        [
            {"params": [module[0].weight, module[2].weight], "weight_decay": 0.1},
            {"params": [module[2].bias], "lr": 0.3, "weight_decay": 0.0},
            {"params": [module[0].bias], "eps": 1e-3},
        ],
        lr=0.02,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_is_followed_with_its_groups(name: str) -> None:
    mine, theirs = net(), net()
    with Trainer(mine, in_fp64(), batch=batch(0), optimizer=OPTIMIZERS[name](mine)) as trainer:
        losses = [float(trainer.step(batch(step))) for step in range(4)]
    wanted = list(plain_steps(theirs, OPTIMIZERS[name](theirs), 4))
    assert losses == pytest.approx([loss for loss, _ in wanted], rel=1e-9)
    assert_equal_parameters(mine, theirs)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=6, cycle_momentum=False
        ),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (n + 1)] * 3),
    ],
    ids=["one cycle", "cosine", "lambda"],
)
def test_learning_rates_are_those_of_any_scheduler_of_torch(
    schedule: Callable[[torch.optim.Optimizer], Any],
) -> None:
    mine, theirs = net(), net()
    optimizer = OPTIMIZERS["groups"](mine)
    scheduler = schedule(optimizer)
    with Trainer(mine, in_fp64(), batch=batch(0), optimizer=optimizer) as trainer:
        assert trainer.optimizer is optimizer
        for step in range(5):
            trainer.step(batch(step))
            scheduler.step()
    own = OPTIMIZERS["groups"](theirs)
    again = schedule(own)
    for step in range(5):
        own.zero_grad()
        theirs[3](theirs[:3](batch(step)), batch(step)).backward()
        own.step()
        again.step()
    assert [group["lr"] for group in own.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ]
    assert_equal_parameters(mine, theirs)


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_subclass_of_an_optimizer_of_torch_is_refused(base: type[torch.optim.Optimizer]) -> None:
    own_step: dict[str, Any] = {"step": lambda *_: None}
    kinds: list[Any] = [type(base.__name__, (base,), added) for added in ({}, own_step)]
    for kind in kinds:
        module = net()
        with pytest.raises(RefusedError, match="a schedule never calls the step of a subclass"):
            Trainer(module, in_fp64(), batch=batch(0), optimizer=kind(module.parameters()))


@pytest.mark.parametrize("given", [torch.optim.AdamW, "AdamW", {"lr": 0.1}])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:  # noqa: ANN401  (what a user gives)
    with pytest.raises(RefusedError, match=r"optimizer: a \w+ must be AdamW, Adam or SGD of torch"):
        Trainer(net(), in_fp64(), batch=batch(0), optimizer=given)


HOOKS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "pre": lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "post": lambda optimizer: optimizer.register_step_post_hook(lambda *_: None),
    "state": lambda optimizer: optimizer.register_state_dict_post_hook(lambda *_: None),
    "loaded": lambda optimizer: optimizer.register_load_state_dict_pre_hook(lambda *_: None),
    "any pre": lambda _: register_optimizer_step_pre_hook(lambda *_: None),
    "any post": lambda _: register_optimizer_step_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("where", HOOKS)
def test_a_hook_of_an_optimizer_is_refused_before_and_during_a_training(where: str) -> None:
    module = net()
    optimizer = OPTIMIZERS["groups"](module)
    hook = HOOKS[where](optimizer)
    refused = pytest.raises(RefusedError, match=r"optimizer: its hook .*<lambda> would find no")
    try:
        with refused:
            Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer)
    finally:
        hook.remove()
    with Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer) as trainer:
        trainer.step(batch(0))
        hook = HOOKS[where](optimizer)
        try:
            with refused:
                trainer.step(batch(1))
        finally:
            hook.remove()
        trainer.step(batch(1))
    assert trainer.steps_done == 2


def test_hooks_of_the_profiler_and_of_the_recorder_may_watch() -> None:
    module, seen = net(), list[object]()
    optimizer = OPTIMIZERS["AdamW"](module)

    def watch(*given: object) -> None:
        seen.append(given[0])

    watch.__module__ = import_module("zsim_record.record.recording").__name__
    hook = register_optimizer_step_post_hook(watch)
    try:
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
            Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer) as trainer,
        ):
            trainer.step(batch(0))
            trainer.step(batch(1))
    finally:
        hook.remove()
    assert seen == [optimizer, optimizer]


def test_a_step_that_is_replaced_is_refused_under_a_scheduler_too() -> None:
    for scheduled in (False, True):
        module = net()
        optimizer: Any = OPTIMIZERS["AdamW"](module)
        optimizer.step = MethodType(lambda _: None, optimizer)
        if scheduled:
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        with pytest.raises(RefusedError, match="optimizer: its step is replaced"):
            Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer)


def test_a_group_that_is_added_and_an_option_that_is_set_are_refused() -> None:
    module = net()
    optimizer = OPTIMIZERS["AdamW"](module)
    more = nn.Parameter(torch.zeros(2))
    with Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer) as trainer:
        trainer.step(batch(0))
        optimizer.add_param_group({"params": [more]})
        with pytest.raises(RefusedError, match="its groups have other parameters than when the"):
            trainer.step(batch(1))
        del optimizer.param_groups[1]
        optimizer.param_groups[0]["maximize"] = True
        with pytest.raises(RefusedError, match="maximize of group 0 is now True, and steps go on"):
            trainer.step(batch(1))


def test_a_rate_that_the_schedule_has_itself_cannot_be_set() -> None:
    model = describe(net(), ("0", "1", "2", "3"), batch(0), precision=Precision.FP64)
    schedule = make_schedule(model, in_fp64(optimizer=Adam(learning_rate=0.1)))
    with Trainer(net(), schedule) as trainer:
        trainer.step(batch(0))
        assert trainer.optimizer is not None
        trainer.optimizer.param_groups[0]["lr"] = 0.01
        with pytest.raises(RefusedError, match=r"lr of group 0 is now 0\.01, and steps go on with"):
            trainer.step(batch(1))


def test_state_of_an_optimizer_is_refused_while_a_schedule_has_it_and_when_it_is_gone() -> None:
    with Trainer(net(), in_fp64(), batch=batch(0)) as trainer:
        assert trainer.optimizer is not None
        with pytest.raises(RefusedError, match="optimizer: the schedule has its state; save and"):
            trainer.optimizer.state_dict()
    module = net()
    optimizer = OPTIMIZERS["AdamW"](module)
    before = optimizer.state_dict()
    with Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer) as trainer:
        trainer.step(batch(0))
        with pytest.raises(RefusedError, match="optimizer: the schedule has its state; save and"):
            optimizer.state_dict()
        with pytest.raises(RefusedError, match="optimizer: the schedule has its state; save and"):
            optimizer.load_state_dict(before)
    module[2](module[0](batch(1))).sum().backward()
    for use in (optimizer.state_dict, optimizer.step):
        with pytest.raises(RefusedError, match="optimizer: its moments have ended with the train"):
            use()
    again = OPTIMIZERS["AdamW"](module)
    again.step()
    optimizer.load_state_dict(again.state_dict())
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_an_optimizer_is_its_own_again_after_an_error_in_the_first_step_and_without_moments() -> (
    None
):
    module = net()
    optimizer = OPTIMIZERS["AdamW"](module)
    trainer = Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        trainer.step(torch.ones(3, 5).double())
    assert list(plain_steps(module, optimizer, 1))
    assert optimizer.state_dict()["state"]
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer) as trainer:
        trainer.step(batch(0))
    assert list(plain_steps(module, optimizer, 1))
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


def test_a_scheduler_that_changes_more_than_learning_rates_is_refused() -> None:
    module = net()
    optimizer = OPTIMIZERS["AdamW"](module)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    with Trainer(module, in_fp64(), batch=batch(0), optimizer=optimizer) as trainer:
        trainer.step(batch(0))
        scheduler.step()
        with pytest.raises(RefusedError, match="optimizer: betas of group 0 is now"):
            trainer.step(batch(1))


def test_a_scheduler_goes_on_from_a_checkpoint_with_the_training(tmp_path: Path) -> None:
    def begun() -> tuple[Trainer, lr_scheduler.LRScheduler]:
        trainer = Trainer(net(), in_fp64(optimizer=Adam(learning_rate=0.1)), batch=batch(0))
        assert trainer.optimizer is not None
        return trainer, lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=6)

    def trained(
        trainer: Trainer, scheduler: lr_scheduler.LRScheduler, start: int, end: int
    ) -> list[float]:
        losses: list[float] = []
        for step in range(start, end):
            losses.append(float(trainer.step(batch(step))))
            scheduler.step()
        return losses

    trainer, scheduler = begun()
    with trainer:
        trained(trainer, scheduler, 0, 3)
        trainer.save(tmp_path, {"scheduler": scheduler})
        rest = trained(trainer, scheduler, 3, 6)
    other, again = begun()
    with other:
        other.load(tmp_path, {"scheduler": again})
        assert trained(other, again, 3, 6) == rest
        with pytest.raises(CheckpointError, match=f"checkpoint {tmp_path}: it has no loader"):
            other.load(tmp_path, {"loader": again})
        with pytest.warns(UserWarning, match="it has scheduler, which is not loaded; give it to"):
            other.load(tmp_path)
        other.load(tmp_path, parameters_only=True)


def test_rules_and_rates_of_a_strategy_train_as_they_say() -> None:
    rates = LearningRates(peak=0.1, warmup_steps=2, decay=Decay.LINEAR, decay_steps=5)
    adam = Adam(learning_rate=LEARNING_RATE)
    seen: list[StepMetrics] = []
    strategy = in_fp64(optimizer=adam, learning_rates=rates)
    mine, theirs = net(), net()
    with Trainer(mine, strategy, batch=batch(0), on_step=seen.append) as trainer:
        for step in range(5):
            trainer.step(batch(step))
    assert [each.learning_rates for each in seen] == [
        {LEARNING_RATE: rates.at(step)} for step in range(5)
    ]
    own = torch.optim.AdamW(theirs.parameters(), weight_decay=0.0)
    scheduler = lr_scheduler.LambdaLR(own, lambda step: rates.at(step) / 1e-3)
    for step in range(5):
        own.zero_grad()
        theirs[3](theirs[:3](batch(step)), batch(step)).backward()
        own.step()
        scheduler.step()
    assert_equal_parameters(mine, theirs)


def test_groups_of_a_strategy_are_groups_of_the_optimizer() -> None:
    bias = ParameterGroup(parameters=("*.bias",), rule=Adam(learning_rate=0.5))
    strategy = in_fp64(groups=(bias,), optimizer=Adam(learning_rate=0.1, weight_decay=0.1))
    module = net()
    with Trainer(module, strategy, batch=batch(0)) as trainer:
        assert trainer.optimizer is not None
        kept = [(group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups]
        assert kept == [(0.1, 0.1), (0.5, 0.0)]


def test_the_norm_of_gradients_is_that_before_they_are_clipped() -> None:
    mine, theirs = net(), net()
    seen: list[StepMetrics] = []
    with Trainer(mine, in_fp64(clip_norm=0.05), batch=batch(0), on_step=seen.append) as trainer:
        for step in range(3):
            trainer.step(batch(step))
        assert trainer.gradient_norm is not None
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0)
    wanted = list(plain_steps(theirs, optimizer, 3, clip=0.05))
    found = [(float(each.loss), float(each.gradient_norm or 0)) for each in seen]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    assert [each.step for each in seen] == [1, 2, 3]
    assert_equal_parameters(mine, theirs)


def test_without_clipping_no_norm_is_computed() -> None:
    with Trainer(net(), in_fp64(), batch=batch(0)) as trainer:
        trainer.step(batch(0))
        assert trainer.gradient_norm is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda module: torch.optim.RMSprop(module.parameters()),
            "optimizer: RMSprop must be AdamW, Adam without weight_decay, or SGD",
        ),
        (
            lambda module: torch.optim.Adam(module.parameters(), weight_decay=0.1),
            "optimizer: Adam must be AdamW, Adam without weight_decay, or SGD",
        ),
        (
            lambda module: torch.optim.AdamW(module.parameters(), amsgrad=True),
            "optimizer: AdamW with amsgrad = True in group 0; it must be off",
        ),
        (
            lambda module: torch.optim.AdamW(module[0].parameters()),
            "optimizer: parameter 2.bias is in none of its groups",
        ),
        (
            lambda module: torch.optim.AdamW(nn.Linear(2, 2).parameters()),
            "optimizer: group 0 has a parameter that is not one of the module",
        ),
    ],
    ids=["RMSprop", "Adam", "amsgrad", "left out", "another's"],
)
def test_an_optimizer_that_no_rule_is_as_is_refused(make: Optimizer, why: str) -> None:
    module = net()
    with pytest.raises(RefusedError) as caught:
        Trainer(module, in_fp64(), batch=batch(0), optimizer=make(module))
    assert str(caught.value) == why
