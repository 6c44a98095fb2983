"""Train a module by a schedule for a number of steps, on this rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import nn

from zsim.backend.backend import RunFailedError
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim_torch.execute.poison import NanOrigin
from zsim_torch.module.unit import UnitChoice
from zsim_torch.rank_result import mean_over_ranks
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

__all__ = ["Option", "Trained", "train"]


@dataclass(slots=True, kw_only=True)
class Trained:
    """Results of a run on this rank.

    `losses` are means over ranks and micro-batches, one for each step. `trace` holds the events of
    this rank only, with the observed figures. In poison mode, if parameters, optimizer state or
    losses of this rank are not finite, `nan_origin` names the operation that read invalid memory.
    """

    losses: tuple[float, ...]
    trace: Trace
    scalars: Mapping[str, float]
    nan_origin: NanOrigin | None = None
    _collect: Callable[[], dict[str, torch.Tensor]] = field(repr=False)
    _close: Callable[[], None] = field(repr=False)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return every full parameter by name, on the CPU; the master copy if there is one.

        A parameter that the module does not have is flat. Every rank must call it before the
        process group is destroyed.
        """
        return self._collect()

    def close(self) -> None:
        """Delete the files of the run now; `full_parameters` cannot be called afterwards."""
        self._close()


def train(
    module: nn.Module,
    units: Sequence[UnitChoice],
    schedule: Schedule,
    batches: Iterable[object],
    *,
    steps: int = 1,
    seed: int = 0,
    option: Option | None = None,
) -> Trained:
    """Run setup and `steps` steps of `schedule` on this rank, with the user's module and data.

    Every rank calls it with an equal module; without a process group the schedule must be for one
    rank. `units` are submodules by path, or pairs of name and module, in the order of forward; each
    is called with the inputs that the schedule names. `batches` yields this rank's micro-batches,
    one for each LOAD. `seed` seeds the delays of poison mode. `Trainer` does the same in the user's
    own loop; this function keeps the trace of all steps.

    Raises:
        RefusedError: the schedule or the units cannot be run, or this run would reset the optimizer
            state of an earlier run of the module; nothing was started.
        UnitError: the units do not make up the module.
        DivergedError: two ranks issued different operations as one collective.
    """
    option = replace(option or Option(), keep_trace=True)
    source = iter(batches)
    with Trainer(module, schedule, units=units, option=option, seed=seed) as trainer:
        for _ in range(steps):
            trainer.step(*_taken(source, trainer.micro_batches))
    run = trainer.run
    return Trained(
        losses=mean_over_ranks(run.losses.means(), run.device, steps=run.steps),
        trace=run.trace(),
        scalars=trainer.scalars,
        nan_origin=run.nan_origin,
        _collect=run.full_parameters,
        _close=run.close_files,
    )


def _taken(source: Iterator[object], count: int) -> list[object]:
    """Return the next `count` micro-batches.

    Raises:
        RunFailedError: fewer are left.
    """
    found = list(islice(source, count))
    if len(found) < count:
        raise RunFailedError("batches: they ended before the last step")
    return found
