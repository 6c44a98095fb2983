"""Trainings of the tiny module that save and load checkpoints, on the ranks of a process group."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tiny_training import UNITS, Case, Parameters, Tiny
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zsim.strategy.optimizer_rule import rate_of
from zsim_torch.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Part:
    """Steps `start` to `stop` of a training, from a checkpoint and to one."""

    case: Case
    start: int = 0
    stop: int = 0
    loaded: Path | None = None
    saved: Path | None = None

    def then(self, stop: int) -> "Part":
        """Return the part that goes on where this one has saved."""
        return replace(self, start=self.stop, stop=stop, loaded=self.saved, saved=None)


@dataclass(slots=True)
class Ended:
    """What is left on a rank."""

    losses: list[float]
    parameters: Parameters
    scalars: dict[str, float]
    steps_done: int
    held: int = 0
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def run(part: Part) -> Ended:
    """Train on this rank."""
    case, rank = part.case, distributed.get_rank()
    count = case.strategy.train.gradient_accumulation_steps
    module = Tiny(case.strategy.train.precision)
    with torch.no_grad():
        if part.loaded is not None:
            for parameter in module.parameters():
                parameter.zero_()
    with Trainer(module, case.strategy, units=UNITS, batch=case.batch(0, 0, 0)) as trainer:
        if part.loaded is not None:
            trainer.load(part.loaded)
        losses = [
            float(trainer.step(*(case.batch(step, number, rank) for number in range(count))))
            for step in range(part.start, part.stop)
        ]
        if part.saved is not None:
            trainer.save(part.saved)
        state = trainer.state_dict()["model"]
        return Ended(
            losses,
            trainer.full_parameters(),
            dict(trainer.scalars),
            trainer.steps_done,
            sum(each.box.elements for value in state.values() for each in value.held),
        )


def run_all(parts: list[Part]) -> list[Ended]:
    """Train part after part in one process group."""
    return [run(part) for part in parts]


def fully_sharded(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The module under PyTorch's fully_shard, and its optimizer."""
    module = Tiny(case.strategy.train.precision)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for unit in (module.first, module.middle, module.last, module):
        fully_shard(unit, mesh=mesh)
    rule = case.strategy.train.optimizer
    return module, torch.optim.AdamW(
        module.parameters(), lr=rate_of(rule, {}), eps=1e-5, weight_decay=0.0
    )


def steps_of_fsdp(
    case: Case, module: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    """Train by PyTorch's own."""
    losses: list[float] = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(case.batch(step, 0, distributed.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def fsdp_saves(case: Case, steps: int, folder: Path) -> list[float]:
    """Train with FSDP2, save as torch's documentation has it; returns the losses of 3 more."""
    module, optimizer = fully_sharded(case)
    steps_of_fsdp(case, module, optimizer, range(steps))
    model, optim = get_state_dict(module, optimizer)
    save({"model": model, "optim": optim}, checkpoint_id=folder)
    return steps_of_fsdp(case, module, optimizer, range(steps, steps + 3))


def fsdp_goes_on(case: Case, steps: int, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Load a checkpoint into FSDP2 as torch's documentation has it, and train 3 more steps."""
    module, optimizer = fully_sharded(case)
    model, optim = get_state_dict(module, optimizer)
    load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=optim)
    found = {name: whole(value) for name, value in module.state_dict().items()}
    return steps_of_fsdp(case, module, optimizer, range(steps, steps + 3)), found


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return all of a sharded tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
