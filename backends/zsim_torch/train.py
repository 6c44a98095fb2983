"""Train a module by a schedule for a number of steps, as one rank of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import nn

from zsim.backend.backend import RunFailedError
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim_torch.execute.poison import Sighting
from zsim_torch.module.unit import UnitChoice
from zsim_torch.rank_result import mean_over_ranks
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

__all__ = ["Option", "Trained", "train"]


@dataclass(slots=True, kw_only=True)
class Trained:
    """Results of a run on its rank.

    `losses` are means over ranks and micro-batches, one for each step. `trace` has this rank alone,
    with what was observed. `sighting` is where memory that is not valid was read in poison mode, if
    parameters, optimizer state or losses of this rank are no numbers.
    """

    losses: tuple[float, ...]
    trace: Trace
    scalars: Mapping[str, float]
    sighting: Sighting | None = None
    _collect: Callable[[], dict[str, torch.Tensor]] = field(repr=False)
    _close: Callable[[], None] = field(repr=False)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter, whole, by name, on the CPU: masters where there are some.

        One that the module does not have is flat. All ranks have to call it, while their process
        group lives.
        """
        return self._collect()

    def close(self) -> None:
        """Give back the files that the run has, at once; there are no full parameters then."""
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

    Every rank calls it with an equal module; without a process group the schedule is for one rank.
    `units` are submodules by path, or pairs of name and module, in the order of forward; each is
    called with the values that the schedule says. `batches` gives this rank's micro-batches, one
    for each LOAD. `seed` seeds the delays of poison mode. `Trainer` does the same in a loop of
    one's own; this keeps the trace of all steps.

    Raises:
        RefusedError: the schedule or the units cannot be run, or an earlier run of the module had
            optimizer state that this one would begin anew; nothing was started.
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
        sighting=run.sighting,
        _collect=run.full_parameters,
        _close=run.close_files,
    )


def _taken(source: Iterator[object], count: int) -> list[object]:
    """Return the next `count` micro-batches.

    Raises:
        RunFailedError: there are less.
    """
    found = list(islice(source, count))
    if len(found) < count:
        raise RunFailedError("batches: they ended before the last step")
    return found
