"""A tiny module of three units, trained by a schedule on ranks, by a plain loop, and by FSDP2."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, Optimizer, rate_of
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.description import describe
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.train import Option, train

TOKENS, WIDTH, LENGTH = 7, 5, 3
UNITS = ("first", "middle", "last")
Parameters = dict[str, torch.Tensor]


class First(nn.Module):
    """Tokens to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.table(batch)
        return made


class Middle(nn.Module):
    """A layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(hidden)
        return torch.tanh(made)


class Last(nn.Module):
    """The loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())


class Tiny(nn.Module):
    """107 parameters, in buckets that no number of ranks but 1 divides."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = First()
        self.middle = Middle()
        self.last = Last()
        self.to(TORCH_DTYPE[precision.optimizer])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.middle(self.first(batch)), batch)
        return loss


@dataclass(frozen=True, slots=True)
class Case:
    """What to train, and for how long."""

    strategy: Strategy
    steps: int = 5
    observe: bool = False
    poison: bool = False
    witness: bool = False

    @cache  # noqa: B019  # cases are few, and tests ask for what their ranks follow, too
    def schedule(self) -> Schedule:
        precision = self.strategy.train.precision
        units = Tiny(precision), UNITS, self.batch(0, 0, 0)
        return make_schedule(describe(*units, precision=precision), self.strategy)

    def batch(self, step: int, micro_batch: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1 + step + 100 * micro_batch + 10_000 * rank)
        return torch.randint(0, TOKENS, (2, LENGTH), generator=generator)

    def batches(self, rank: int) -> Iterator[torch.Tensor]:
        for step in range(self.steps):
            for micro_batch in range(self.strategy.train.gradient_accumulation_steps):
                yield self.batch(step, micro_batch, rank)


@dataclass(frozen=True, slots=True)
class Result:
    """What is left on a rank."""

    parameters: Parameters
    losses: tuple[float, ...]
    trace: Trace
    scalars: dict[str, float]

    @property
    def observed(self) -> dict[str, float]:
        return dict(self.trace.observed)


def by_schedule(case: Case, made: Schedule | None = None) -> Result:
    """Train on this rank, by the schedule of `case` or by `made`."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    trained = train(
        Tiny(case.strategy.train.precision),
        UNITS,
        made or case.schedule(),
        case.batches(rank),
        steps=case.steps,
        option=Option(
            observe=case.observe, poison=case.poison, witness=case.witness, write_back=False
        ),
    )
    return Result(trained.full_parameters(), trained.losses, trained.trace, dict(trained.scalars))


def all_by_schedule(cases: list[Case], made: list[Schedule]) -> list[Result]:
    """Train case after case in one process group, each by its schedule."""
    return [by_schedule(*each) for each in zip(cases, made, strict=True)]


def trained_on_ranks(pool: RankPool, cases: list[Case]) -> tuple[list[Result], ...]:
    """Train case after case on the ranks of `pool`, by schedules that are made here, once."""
    return pool.run(all_by_schedule, cases, [case.schedule() for case in cases])


def optimizer_of(case: Case, module: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's own optimizer for the rules of `case`, which are given their learning rates."""
    return optimizer_of_rules(case.strategy, module, lr=0.0)


def constants_of_torch(rule: Optimizer) -> dict[str, Any]:
    """The constants of SGD or Adam under the names that torch has for them."""
    match rule:
        case SGD():
            found: dict[str, Any] = {"momentum": rule.momentum, "nesterov": rule.nesterov}
        case Adam():
            found = {"betas": (rule.beta1, rule.beta2), "eps": rule.epsilon}
        case _:
            raise AssertionError(rule)
    return {"weight_decay": rule.weight_decay, **found}


def optimizer_of_rules(
    strategy: Strategy, module: nn.Module, lr: float | None = None
) -> torch.optim.Optimizer:
    """PyTorch's own optimizer for the rules of `strategy`, each with a group of its own."""
    held: dict[Optimizer, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        held.setdefault(strategy.rule_of(name), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": own, "rule": rule, **constants_of_torch(rule)}
        | {"lr": rate_of(rule, {}) if lr is None else lr}
        for rule, own in held.items()
    ]
    if isinstance(strategy.train.optimizer, SGD):
        return torch.optim.SGD(groups)
    return torch.optim.AdamW(groups)


def give(case: Case, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of a step."""
    rates = case.strategy.train.learning_rates
    given = {} if rates is None else {LEARNING_RATE: rates.at(step)}
    for group in optimizer.param_groups:
        group["lr"] = rate_of(group["rule"], given)


def values(module: nn.Module) -> Parameters:
    """Copies of the parameters."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def by_plain_loop(case: Case) -> tuple[Parameters, Parameters, tuple[float, ...]]:
    """One process, the whole batch: parameters before and after, and the mean loss of each step."""
    module = Tiny(case.strategy.train.precision)
    before = values(module)
    optimizer = optimizer_of(case, module)
    count = case.strategy.replicas * case.strategy.train.gradient_accumulation_steps
    losses: list[float] = []
    for step in range(case.steps):
        optimizer.zero_grad()
        give(case, optimizer, step)
        total = 0.0
        for rank in range(case.strategy.replicas):
            for micro_batch in range(case.strategy.train.gradient_accumulation_steps):
                loss = module(case.batch(step, micro_batch, rank)) / count
                loss.backward()
                total += float(loss.detach())
        if case.strategy.train.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), case.strategy.train.clip_norm)
        optimizer.step()
        losses.append(total)
    return before, values(module), tuple(losses)


def by_fsdp(case: Case) -> Parameters:
    """PyTorch's fully_shard on the ranks of this process group."""
    module = Tiny(case.strategy.train.precision)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for unit in (module.first, module.middle, module.last, module):
        fully_shard(unit, mesh=mesh)
    optimizer = optimizer_of(case, module)
    micro_batches = case.strategy.train.gradient_accumulation_steps
    for step in range(case.steps):
        optimizer.zero_grad()
        give(case, optimizer, step)
        for micro_batch in range(micro_batches):
            loss = module(case.batch(step, micro_batch, distributed.get_rank())) / micro_batches
            loss.backward()
        optimizer.step()
    assert isinstance(module, FSDPModule)
    return {name: value.full_tensor() for name, value in module.state_dict().items()}


def by_schedule_and_fsdp(case: Case, made: Schedule, other: Case) -> tuple[Result, Parameters]:
    """Train `case` by its schedule, and `other` by fully_shard, in one process group."""
    return by_schedule(case, made), by_fsdp(other)


def distance(one: Parameters, other: Parameters, start: Parameters) -> float:
    """||one - other|| / ||other - start||."""

    def norm(left: Parameters, right: Parameters) -> float:
        squares = [(left[name].double() - right[name].double()).square().sum() for name in right]
        return float(torch.stack(squares).sum().sqrt())

    assert set(one) == set(other) == set(start)
    return norm(one, other) / norm(other, start)


def grid(ranks: int) -> list[Case]:
    """Every stage, accumulation, checkpointing, optimizer and format.

    This module has no attention, so selective checkpointing is as none. fp32 differs from fp64 in
    its bounds and in nothing else: it has one accumulation and checkpointing for each of the rest.
    """
    return [
        case
        for case in whole_grid(ranks)
        if case.strategy.activations.checkpointing is Checkpointing.FULL
        or (
            case.strategy.activations.checkpointing is Checkpointing.NONE
            and case.strategy.train.precision is Precision.FP64
        )
        if case.strategy.train.gradient_accumulation_steps == 3
        or case.strategy.train.precision is Precision.FP64
    ]


def whole_grid(ranks: int) -> list[Case]:
    """Every combination of the same."""
    return [
        Case(
            Strategy(
                parallel=Parallel(data=ranks),
                zero=Zero(stage=stage, bucket_elements=60),
                activations=Activations(checkpointing=checkpointing),
                train=Train(
                    gradient_accumulation_steps=micro_batches,
                    optimizer=optimizer,
                    precision=precision,
                ),
            ),
            steps=STEPS,
        )
        for stage in (0, 1, 2, 3)
        for micro_batches in (1, 3)
        for checkpointing in Checkpointing
        for optimizer in (SGD(learning_rate=0.1), Adam(learning_rate=0.01, epsilon=1e-5))
        for precision in (Precision.FP32, Precision.FP64)
    ]


STEPS = 3
"""Of a training that is compared: one from the first state, one from what it left, one after it."""

BOUND = {Precision.PURE_BF16: 2**-6, Precision.FP32: 1e-4, Precision.FP64: 1e-10}
"""Largest distance of two ways to train, relative to the change; a sum in bf16 is off by 2^-9."""
