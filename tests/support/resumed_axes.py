"""Transformers on ranks along tensor and pipeline axes that save, load and evaluate."""

from dataclasses import dataclass, replace
from pathlib import Path

from tiny_training import Parameters
from torch import distributed
from trained_axes import SEED, AxesCase, place_of

from zsim_torch.feed import feed
from zsim_torch.module.tensor_part import TensorPlace
from zsim_torch.trainer import Trainer


@dataclass(frozen=True, slots=True)
class AxesPart:
    """Steps `start` to `stop` of a training, from a checkpoint and to one."""

    case: AxesCase
    start: int = 0
    stop: int = 0
    loaded: Path | None = None
    saved: Path | None = None

    def then(self, stop: int) -> "AxesPart":
        """Return the part that goes on where this one has saved."""
        return replace(self, start=self.stop, stop=stop, loaded=self.saved, saved=None)


@dataclass(frozen=True, slots=True)
class AxesEnded:
    """What is left on a rank."""

    place: TensorPlace
    losses: tuple[float, ...]
    evaluated: float
    parameters: Parameters
    steps_done: int


def run_parts(parts: list[AxesPart]) -> list[AxesEnded]:
    """Train part after part in one process group; each ends with an evaluation."""
    return [run_part(part) for part in parts]


def run_part(part: AxesPart) -> AxesEnded:
    """Train on this rank. What begins from a checkpoint has other values before."""
    case = replace(part.case, steps=max(part.stop, 1))
    job = case.job()
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    count = case.strategy.train.gradient_accumulation_steps
    batches = list(feed(job, rank, data=None, seed=SEED))
    with Trainer.of_job(job, seed=SEED if part.loaded is None else SEED + 1) as trainer:
        if part.loaded is not None:
            trainer.load(part.loaded)
        losses = [
            trainer.average(trainer.step(*batches[count * step : count * (step + 1)]))
            for step in range(part.start, part.stop)
        ]
        evaluated = trainer.average(trainer.evaluate(*batches[:count]))
        if part.saved is not None:
            trainer.save(part.saved)
        return AxesEnded(
            place_of(job.schedule),
            tuple(losses),
            evaluated,
            trainer.full_parameters(),
            trainer.steps_done,
        )
