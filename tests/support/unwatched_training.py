"""The tiny module trained as users train: no poison, no witness, nothing kept of what ran.

Prepared updates, leaves of autograd and memory that serves again are in use there alone, or nowhere
else together. Torch's own loop judges values. A second run, in which a mode of torch sees storages,
says what a step leaves and the most that lives.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from live_storages import LiveStorages
from tiny_training import BOUND, UNITS, Case, Parameters, Tiny, distance, values
from torch import nn

from zsim.schedule.operation import (
    Allocate,
    Communication,
    Copy,
    Edge,
    Free,
    Operation,
    View,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.execute import reserve
from zsim_torch.execute.optimizer_groups import with_optimizer
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

CASE = Case(
    Strategy(
        parallel=Parallel(data=1),
        # Updates of 65 and 42 elements: a whole vector and what is left over, and that alone.
        zero=Zero(stage=1, bucket_elements=110),
        train=Train(
            optimizer=Adam(learning_rate=0.01, epsilon=1e-5, weight_decay=0.1),
            clip_norm=0.05,
            gradient_accumulation_steps=2,
        ),
    ),
    steps=5,
)
RATES = ((0.01, 0.02, 0.005, 0.03, 0.015, 0.0), (0.02, 0.01, 0.04, 0.005, 0.02, 0.0))
"""Learning rates of both groups in each step, and behind the last one."""


@dataclass(frozen=True, slots=True)
class Unwatched:
    """Result of a training: parameters and losses, bytes after each step, and at most."""

    parameters: Parameters
    losses: tuple[float, ...]
    left: tuple[int, ...]
    peak: int


Start = Callable[[], tuple[Trainer, Callable[[], object]]]


def optimizer_of(module: Tiny) -> torch.optim.Optimizer:
    """Return torch's own, with the last unit in a group of its own."""
    rule = CASE.strategy.train.optimizer
    assert isinstance(rule, Adam)
    groups: list[dict[str, Any]] = [
        {"params": [*module.first.parameters(), *module.middle.parameters()]},
        {"params": [*module.last.parameters()], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, eps=rule.epsilon, weight_decay=rule.weight_decay)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [each.__getitem__ for each in RATES])


def scheduled() -> tuple[Trainer, Callable[[], object]]:
    """Return a trainer with an optimizer of torch, and what steps the scheduler of its rates."""
    module = Tiny(CASE.strategy.train.precision)
    optimizer, batch = optimizer_of(module), CASE.batch(0, 0, 0)
    rates = scheduler_of(optimizer)
    trainer = Trainer(module, CASE.strategy, units=UNITS, batch=batch, optimizer=optimizer)
    return trainer, rates.step


def moving() -> tuple[Trainer, Callable[[], object]]:
    """Return a trainer of which all that stays goes into other memory at the end of each step."""
    module = Tiny(CASE.strategy.train.precision)
    chosen = with_optimizer(CASE.strategy.but({"zero.stage": 2}), module, optimizer_of(module))
    made = moved(replace(CASE, strategy=chosen.strategy).schedule())
    given = {name: rates.__getitem__ for name, rates in zip(chosen.rates, RATES, strict=True)}
    return Trainer(module, made, units=UNITS, option=Option(given=given)), lambda: None


def moved(schedule: Schedule) -> Schedule:
    """Return `schedule` with steps that end by giving what stays to memory taken anew."""
    (program,) = schedule.programs
    ends = tuple(each.id for each in walk(program.step) if isinstance(each, Communication))
    more = [each for name in program.persistent for each in moves(program, name, ends)]
    spares = [replace(program.by_name[name], name=spare(name)) for name in program.persistent]
    changed = replace(program, buffers=(*program.buffers, *spares), step=(*program.step, *more))
    return replace(schedule, programs=(changed,))


def spare(name: str) -> str:
    return f"{name}/spare"


def moves(program: Program, name: str, after: tuple[Edge, ...]) -> Iterator[Operation]:
    """Yield what copies a buffer out, gives its memory away and takes other memory for it."""
    size, at = program.by_name[name].elements, f"step/move/{name}"
    own, other = View(buffer=name, size=size), View(buffer=spare(name), size=size)
    out, back = f"{at}/out", f"{at}/back"
    yield Allocate(id=f"{at}/allocate/spare", buffer=spare(name))
    yield Copy(id=out, stream="compute", after=after, source=own, target=other)
    yield Free(id=f"{at}/free", buffer=name, uses=(out,))
    yield Allocate(id=f"{at}/allocate", buffer=name)
    yield Copy(id=back, stream="compute", source=other, target=own)
    yield Free(id=f"{at}/free/spare", buffer=spare(name), uses=(back,))


@contextmanager
def reserving(*, reserves: bool) -> Generator[None]:
    """Let memory of any size serve again."""
    with patch.object(reserve, "LARGE_BYTES", 1) if reserves else nullcontext():
        yield


def trained(start: Start, *, looks: bool) -> Unwatched:
    """Train by what `start` makes; look at storages if `looks`."""
    live = LiveStorages() if looks else None
    losses, left = list[float](), list[int]()
    with reserving(reserves=start is moving), live or nullcontext():
        trainer, step_rates = start()
        for step in range(CASE.steps):
            loss = trainer.step(*(CASE.batch(step, number, 0) for number in range(2)))
            losses.append(float(loss))
            step_rates()
            if live is not None:
                del loss
                gc.collect()
                left.append(live.bytes())
        parameters = trainer.full_parameters()
        trainer.finish()
    return Unwatched(parameters, tuple(losses), tuple(left), live.peak if live else 0)


def by_trainer(start: Start) -> tuple[str, int]:
    """Judge a training: what is wrong with it, if anything is, and the bytes that live at most."""
    before, parameters, losses = by_torch()
    found, seen = trained(start, looks=False), trained(start, looks=True)
    bound = BOUND[CASE.strategy.train.precision]
    for each in (found, seen):
        if not distance(each.parameters, parameters, before) <= bound:
            return "values: not those of a plain loop", seen.peak
        if not all(
            abs(one - other) <= 1e-5 * abs(other)  # not so either of what is no number
            for one, other in zip(each.losses, losses, strict=True)
        ):
            return "values: other losses than a plain loop", seen.peak
    if len(set(seen.left)) > 1:
        return f"memory: steps leave {seen.left} bytes", seen.peak
    return "", seen.peak


@cache
def by_torch() -> tuple[Parameters, Parameters, tuple[float, ...]]:
    """Train by torch's own loop: parameters before and after, and losses."""
    module = Tiny(CASE.strategy.train.precision)
    before, losses, optimizer = values(module), list[float](), optimizer_of(module)
    rates = scheduler_of(optimizer)
    for step in range(CASE.steps):
        optimizer.zero_grad()
        made = [module(CASE.batch(step, number, 0)) / 2 for number in range(2)]
        total = torch.stack(made).sum()
        total.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        losses.append(float(total.detach()))
        nn.utils.clip_grad_norm_(module.parameters(), CASE.strategy.train.clip_norm or 0.0)
        optimizer.step()
        rates.step()
    return before, values(module), tuple(losses)
