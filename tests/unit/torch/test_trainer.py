"""The trainer in a loop of one's own: equal to torch's own training, step by step."""

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import UNITS, Case, Tiny
from torch import distributed, nn
from torch.optim import lr_scheduler

import zsim
from zsim.backend.backend import RefusedError
from zsim.runtimes.registry import make_schedule
from zsim.strategy.learning_rate import Decay, LearningRates
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, ParameterGroup
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_torch.module.description import describe
from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.run_option import Option
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.train import train
from zsim_torch.trainer import StepMetrics, Trainer

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
        with pytest.raises(Exception, match=f"checkpoint {tmp_path}: it has no loader"):
            other.load(tmp_path, {"loader": again})


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
    assert [(float(each.loss), float(each.gradient_norm or 0)) for each in seen] == [
        (pytest.approx(loss, rel=1e-9), pytest.approx(norm, rel=1e-9)) for loss, norm in wanted
    ]
    assert [each.step for each in seen] == [1, 2, 3]
    assert_equal_parameters(mine, theirs)


def test_without_clipping_no_norm_is_computed() -> None:
    with Trainer(net(), in_fp64(), batch=batch(0)) as trainer:
        trainer.step(batch(0))
        assert trainer.gradient_norm is None


class Evaluated(nn.Module):
    """Units whose evaluation differs from their training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.loss = Loss()


def on_ranks(stage: int) -> tuple[list[float], list[float], bool]:
    """Train with evaluations in between, and without; and evaluate torch's own module."""
    rank = distributed.get_rank()
    strategy = Strategy(parallel=Parallel(data=2), zero=Zero(stage=stage, bucket_elements=10))
    data = [batch(10 * rank + step).float() for step in range(4)]
    held = batch(99).float(), batch(98).float()

    def trained(module: Evaluated, *, between: bool) -> list[float]:
        torch.manual_seed(rank)
        found: list[float] = []
        with Trainer(module, strategy, units=("body", "loss"), batch=data[0]) as trainer:
            for each in data:
                trainer.step(each)
                if between:
                    found.append(float(trainer.evaluate(*held)))
        return found

    one, other = Evaluated(), Evaluated()
    evaluated = trained(one, between=True)
    trained(other, between=False)
    mine, theirs = one.state_dict(), other.state_dict()
    same = all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert one.training
    one.eval()
    plain = [float(one.loss(one.body(each), each).detach()) for each in held]
    return evaluated, plain, same


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_is_that_of_the_module_and_changes_no_bit_of_the_training(
    pool: RankPool, stage: int
) -> None:
    for evaluated, plain, same in pool.run(on_ranks, stage):
        assert same
        assert evaluated[-1] == pytest.approx(sum(plain) / 2, rel=1e-6)
        assert len(set(evaluated)) == 4


def averages() -> tuple[float, float]:
    case = Case(Strategy(parallel=Parallel(data=2), zero=Zero(stage=1)))
    with Trainer(
        Tiny(Precision.FP32), case.strategy, units=UNITS, batch=case.batch(0, 0, 0)
    ) as trainer:
        loss = trainer.step(case.batch(0, 0, distributed.get_rank()))
        return float(loss), trainer.average(loss)


def test_a_loss_is_the_rank_s_own_and_average_is_over_all(pool: RankPool) -> None:
    (one, mean), (other, again) = pool.run(averages)
    assert one != other
    assert mean == again == pytest.approx((one + other) / 2)


def test_train_is_a_loop_over_the_trainer() -> None:
    case = Case(STAGE_2.but({"train.gradient_accumulation_steps": 2}), steps=3)
    one, other = Tiny(Precision.FP32), Tiny(Precision.FP32)
    losses = train(one, UNITS, case.schedule(), case.batches(0), steps=3).losses
    data = list(case.batches(0))
    with Trainer(other, case.schedule(), units=UNITS) as trainer:
        found = [float(trainer.step(*data[2 * step : 2 * step + 2])) for step in range(3)]
    assert tuple(found) == losses
    for name, value in one.named_parameters():
        assert torch.equal(value, other.get_parameter(name))


def test_a_scenario_says_how_to_train_a_module_of_one_s_own() -> None:
    scenario = zsim.load("tiny", {"zero.stage": 3, "train.gradient_accumulation_steps": 1}, ranks=1)
    mine, theirs = net().float(), net().float()
    with Trainer(mine, scenario, batch=batch(0).float()) as trainer:
        one = float(trainer.step(batch(0).float()))
    with Trainer(theirs, scenario.strategy, batch=batch(0).float()) as trainer:
        assert float(trainer.step(batch(0).float())) == one
    assert_equal_parameters(mine, theirs)


def bytes_a_step(trainer: Trainer) -> float:
    """Train, and return by how much Python's memory grows with a step."""
    data, sizes = batch(0), list[int]()
    tracemalloc.start()
    try:
        for _ in range(3):
            for _ in range(100):
                trainer.step(data)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return (sizes[2] - sizes[1]) / 100


def test_memory_does_not_grow_with_the_steps_unless_the_trace_is_kept() -> None:
    strategy = in_fp64(clip_norm=1.0)
    with Trainer(net(), strategy, batch=batch(0)) as trainer:
        assert bytes_a_step(trainer) < 100
    kept = Option(keep_trace=True)
    with Trainer(net(), strategy, batch=batch(0), option=kept) as trainer:
        assert bytes_a_step(trainer) > 5_000


@pytest.mark.long
def test_resident_memory_is_flat_over_ten_thousand_steps() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    data = batch(0)
    with Trainer(net(), in_fp64(clip_norm=1.0), batch=batch(0)) as trainer:
        for _ in range(500):
            trainer.step(data)
        before = resident()
        for _ in range(10_000):
            trainer.step(data)
        assert resident() - before < 2_000_000


def schedule() -> zsim.Schedule:
    model = describe(net(), ("0", "1", "2", "3"), batch(0), precision=Precision.FP64)
    return make_schedule(model, in_fp64())


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


def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_lost() -> None:
    module = net()
    with pytest.raises(RefusedError, match="optimizer: the schedule has its rules"):
        Trainer(module, schedule(), optimizer=SGD())
    with pytest.raises(ModuleUnitError, match=r"units: missing; ModuleDict is no nn\.Sequential"):
        Trainer(nn.ModuleDict({"net": module}), in_fp64(), batch=batch(0))
    with Trainer(module, in_fp64(), batch=batch(0)) as trainer:
        with pytest.raises(RefusedError) as caught:
            trainer.step(batch(0), batch(1))
        assert str(caught.value) == "batches: a step loads 1 of this rank, 2 are given"
        with pytest.raises(RefusedError, match=r"trace: not kept; say Option\(keep_trace=True\)"):
            trainer.trace()
        trainer.step(batch(0))
    with pytest.raises(RefusedError, match="trainer: its training has ended; make another one"):
        trainer.step(batch(0))


def test_after_an_error_the_module_has_what_it_came_with() -> None:
    module = net()
    before = [parameter.clone() for parameter in module.parameters()]
    trainer = Trainer(module, in_fp64(), batch=batch(0))
    trainer.step(batch(0))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        trainer.step(torch.ones(3, 5).double())
    for parameter, was in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
    with pytest.raises(RefusedError, match="its training has ended"):
        trainer.step(batch(0))


def test_finish_gives_the_module_what_was_trained() -> None:
    module = net()
    trainer = Trainer(module, in_fp64(), batch=batch(0))
    trainer.step(batch(0))
    wanted = trainer.full_parameters()
    trainer.finish()
    for name, value in module.named_parameters():
        assert torch.equal(value, wanted[name])
