"""A training of a module by a schedule, as one rank of it, step by step in the user's own loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

import zsim
from zsim.backend.backend import Job, RefusedError
from zsim.cluster.cluster import Cluster
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.strategy import Strategy
from zsim.trace.trace import Trace
from zsim_torch.execute.evaluation import Evaluation, need_shapes, shapes_of
from zsim_torch.feed import micro_batches
from zsim_torch.initial_values import initial_values
from zsim_torch.job_module import JobModule
from zsim_torch.module.absent import readable
from zsim_torch.module.compiled import uncompiled
from zsim_torch.module.module_loss import LossOf, loss_of
from zsim_torch.module.module_state import evaluating
from zsim_torch.module.unit import UnitChoice
from zsim_torch.module_schedule import (
    HasStrategy,
    groups_of,
    planned_module,
    schedule_of,
    unit_choices,
    units_of,
)
from zsim_torch.rank_admission import (
    need_runnable,
    need_start,
    need_values_and_memory,
    place,
)
from zsim_torch.rank_result import mean_over_ranks, write_schedule, write_together
from zsim_torch.rank_run import RankRun
from zsim_torch.run_option import Option, given_in
from zsim_torch.step_metrics import StepMetrics

if TYPE_CHECKING:
    from zsim.api.run_result import RunResult
    from zsim_torch.checkpoint.saved_training import SavedTraining, Stateful

SIMULATED_STEPS = 3
"""Steps of a prediction: the last one is what is told."""

CHECKPOINTS = "zsim_torch.checkpoint.saved_training"
"""Imported when a checkpoint is asked for: torch needs a second for what writes them."""


class Trainer:
    """Trains `module` on this rank; every rank makes one with an equal module.

        with Trainer(module, strategy, batch=first) as trainer:
            for batch in batches:
                loss = trainer.step(batch)

    While it trains, the module holds no parameters: the schedule has them. At the end of `with`, or
    with `finish`, the module has those that were trained. After an error in the first step it has
    those that it came with. After an error in a later one, or between steps of several ranks, it
    has none, and to read or save them is refused. A module on "meta" stays there.

    Attributes:
        schedule: what the ranks do.
        model: the module as the simulator has it; None where only a schedule was given.
        micro_batches: how many batches a step takes: those of a replica, on each of its ranks.
        steps_done: steps since the training began, those before a checkpoint included.
        run: the run of the schedule on this rank.
    """

    def __init__(  # noqa: PLR0913  (options, by keyword)
        self,
        module: nn.Module,
        source: Schedule | Strategy | HasStrategy,
        *,
        units: Sequence[UnitChoice] | None = None,
        batch: object = None,
        loss: LossOf = loss_of,
        reads: Mapping[str, Sequence[str]] | None = None,
        optimizer: torch.optim.Optimizer | Optimizer | None = None,
        on_step: Callable[[StepMetrics], object] | None = None,
        option: Option | None = None,
        seed: int = 0,
    ) -> None:
        """Check that this rank can train, and run setup.

        Args:
            module: its parameters are trained, from the values that they have.
            source: a schedule; or a strategy or scenario to make it from (`with_buckets` applies).
            units: submodules by path, or pairs of name and module, in the order of forward. By
                default the children of an `nn.Sequential`; of any other module its repeated
                blocks, with what its forward does between them.
            batch: a micro-batch to measure the units on, where the schedule is to be made.
            loss: of a module and a batch, where units are found. By default the module is called
                with the batch, or what is in it if that is a mapping (by keyword), tuple or list,
                and returns its loss, or something with a `loss`.
            reads: what each unit is called with, as `describe` has it.
            optimizer: AdamW or SGD of torch with its groups, or a rule, instead of the strategy's.
            on_step: is told the numbers of each step.
            option: settings of this rank.
            seed: of the delays of poison mode.

        Raises:
            RefusedError: schedule, units or optimizer cannot be run, or ranks' values differ.
            ModuleUnitError: the units do not make up the module.
        """
        option = option or Option()
        need_start(module, optimizer, option)
        with uncompiled(module.modules()), readable(module):
            planned = planned_module(module, source, units, batch, loss=loss)
            chosen = planned or unit_choices(module, units)
            made = schedule_of(module, source, chosen, batch, reads, optimizer)
        self.schedule, rates, shapes, self.model = made
        schedule = self.schedule
        rank, device = place(schedule, module, option)
        program = schedule.program_of(rank)
        resolved = units_of(module, chosen)
        need_runnable(schedule, program, resolved, blocking=device.type == "cpu")
        need_values_and_memory(module, schedule, program, option)
        self._groups = groups_of(schedule, module, rates, optimizer=optimizer)
        known = {name: partial(self._rate, name) for name in rates}
        self._given = given_in(schedule, option, known)
        self.micro_batches = micro_batches(schedule)
        self.steps_done, self._on_step = 0, on_step
        self._shapes = None if batch is None else shapes_of(batch)
        with initial_values(module, resolved, option.initial) as initial:
            make = partial(RankRun, rank=rank, device=device, option=option, initial=initial)
            self.run = make(module, resolved, schedule, seed=seed)
        self.run.machine.computer.expect(shapes)
        self.run.prepare = None if planned is None else planned.plan

    @classmethod
    def of_job(
        cls,
        job: Job,
        *,
        on_step: Callable[[StepMetrics], object] | None = None,
        option: Option | None = None,
        seed: int = 0,
    ) -> Self:
        """Train the transformer of a job, `zsim.load(...).job`, along all axes of its schedule.

        Its parameters begin with values that `seed` draws, or those of `option`. A rank has no more
        of them than its schedule says, and the module stays empty: see `save`.

        Raises:
            RefusedError: as the constructor.
        """
        option = option or Option()
        made = JobModule.of(job, seed=seed)
        if option.initial is None:
            option = replace(option, initial=made.initial)
        return cls(
            made.module,
            job.schedule,
            units=made.units,
            on_step=on_step,
            option=option,
            seed=seed,
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Groups and constants of the schedule as an optimizer of torch, for its schedulers.

        It updates nothing. A step reads the learning rates of its groups, where the schedule has
        none of its own. None where nothing is updated.
        """
        return self._groups.optimizer

    @property
    def scalars(self) -> Mapping[str, float]:
        """Numbers of the host by name: updates done, and with fp16 the loss scale."""
        return dict(self.run.executor.scalars)

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """Norm of all gradients of the last step before it was clipped; None without clipping."""
        return self.run.gradient_norm()

    def step(self, *batches: object) -> torch.Tensor:
        """Train on one step's micro-batches of this rank, and return the mean of their losses.

        Every rank calls it. The loss is this rank's; `average` gives that of all ranks.

        Raises:
            RefusedError: there are not as many as the step loads, or the training has ended.
        """
        if len(batches) != self.micro_batches:
            raise RefusedError(
                f"batches: a step takes {self.micro_batches} on this rank, {len(batches)} are given"
            )
        given = {name: at(self.steps_done) for name, at in self._given.items()}
        self._groups.set_rates(given)
        for batch in batches[:1]:
            self._shapes = self._shapes or shapes_of(batch)
        self.run.step(batches, given)
        self._groups.note_step()
        self.steps_done += 1
        loss = self.run.loss()
        if self._on_step is not None:
            metrics = StepMetrics(
                step=self.steps_done,
                loss=loss,
                gradient_norm=self.gradient_norm,
                learning_rates=self._groups.rates(),
            )
            self._on_step(metrics)
        return loss

    def evaluate(self, *batches: object) -> torch.Tensor:
        """Return the mean loss of micro-batches without training on them; every rank calls it.

        Units run in evaluation mode, in the format of training; as many batches as one likes. On
        stages of a pipeline that make no loss it is NaN, as that of `step`; `average` gives that of
        all ranks. With tensor or pipeline ranks batches have the shapes of training.

        Raises:
            RefusedError: there are no batches, one has another shape where ranks exchange what
                units make of it, or the training has ended.
        """
        self.run.need_life()
        if not batches:
            raise RefusedError("batches: at least one is needed to evaluate")
        self.run.machine.streams.drain()
        evaluation = Evaluation(self.run.machine, self.run.units)
        if evaluation.is_shared:
            need_shapes(batches, self._shapes)
        losses: list[torch.Tensor] = []
        for batch in batches:
            with evaluating([self.run.module]):
                prepared = self.run.prepared(batch)
            loss = evaluation.loss(prepared)
            losses.append(torch.tensor(torch.nan) if loss is None else loss)
        return torch.stack(losses).float().mean()

    def average(self, value: torch.Tensor) -> float:
        """Return the mean of a number over all ranks; every rank calls it."""
        own = (float(value),) if self.run.makes_losses else ()
        return mean_over_ranks(own, self.run.device, steps=1)[0]

    def state_dict(self, beside: "Mapping[str, Stateful] | None" = None) -> dict[str, Any]:
        """Return what a checkpoint has, for `torch.distributed.checkpoint.save`.

        Parameters and moments are tensors of which this rank has parts, in the memory of the
        training: save them before the next step.

        Raises:
            RefusedError: the training has ended, or a step leaves something else to the next.
        """
        return self._saved().state_dict(self.steps_done, beside or {})

    def save(
        self, path: str | PathLike[str], beside: "Mapping[str, Stateful] | None" = None
    ) -> None:
        """Write a checkpoint into the folder `path`; every rank calls it.

        `beside` is saved with it: a scheduler, a data loader, equal on all ranks. A checkpoint that
        is in the folder is replaced at once when the new one is complete.

        Raises:
            CheckpointError: it cannot be written; what was in the folder is as it was.
            RefusedError: as `state_dict`.
        """
        self._saved().save(Path(path), self.steps_done, beside or {})

    def load(
        self,
        path: str | PathLike[str],
        beside: "Mapping[str, Stateful] | None" = None,
        *,
        parameters_only: bool = False,
        keep_groups: bool = False,
    ) -> None:
        """Go on from the checkpoint in the folder `path`; every rank calls it.

        It may be of any number of ranks and any stage, or FSDP2's. With `parameters_only` the
        optimizer starts again. The optimizer takes the learning rates of the checkpoint, whose
        other constants must be its own; with `keep_groups` it keeps its own rates and constants.
        Nothing that the files name is run, but for classes that you have allowed
        (`torch.serialization.add_safe_globals`).

        Raises:
            CheckpointError: it is of another model or optimizer, or would run code, and nothing has
                changed; or tensors cannot be read, and the training has ended.
            RefusedError: the training has ended, or a step leaves something else to the next.
        """
        saved = self._saved()
        plan = saved.plan(
            Path(path), beside or {}, parameters_only=parameters_only, keep_groups=keep_groups
        )
        with self.run.guarded():
            self.steps_done = saved.read(plan)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return every parameter by name, whole, on the CPU: masters where there are some.

        Every rank calls it.
        """
        self.run.machine.streams.drain()
        return self.run.full_parameters()

    def trace(self) -> Trace:
        """Return what this rank has run and when, with what was observed.

        Raises:
            RefusedError: `Option(keep_trace=True)` was not said.
        """
        self.run.machine.streams.drain()
        return self.run.trace()

    def write_trace(self, path: str | PathLike[str]) -> None:
        """Write what all ranks have run into one file, for `check --against`; every rank calls it.

        The first rank writes it. Times are each rank's own, since its first step began.

        Raises:
            RefusedError: `Option(keep_trace=True)` was not said, or no file can be written.
        """
        write_together(self.schedule, self.trace(), Path(path))

    def write_schedule(self, path: str | PathLike[str]) -> None:
        """Write the schedule as JSON for `check` and `run`; every rank calls it, the first writes.

        Raises:
            RefusedError: it cannot be written.
        """
        write_schedule(self.schedule, self.model, Path(path))

    def simulate(self, cluster: Cluster, *, steps: int = SIMULATED_STEPS) -> "RunResult":
        """Return the prediction of this training on `cluster`, as `zsim.run` does.

        Each rank that calls it simulates for itself; nothing of the training changes.

        Raises:
            RefusedError: the trainer was given a schedule, which says nothing of kernels.
            MistakeError: the cluster cannot run it.
        """
        if self.model is None:
            raise RefusedError(
                "simulate: the trainer was given a schedule; give a strategy, so "
                "that the module is described"
            )
        job = Job(schedule=self.schedule, model=self.model, cluster=cluster, steps=steps)
        return zsim.run(job)

    def finish(self) -> None:
        """End the training: ranks agree on what they issued, the module has its parameters.

        Raises:
            DivergedError: two ranks issued different operations as one collective.
        """
        self.run.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the training, or give it up after an error."""
        if error is not None:
            self.run.give_up(error)
        elif not self.run.has_ended:
            self.finish()

    def _rate(self, name: str, _: int) -> float:
        return self._groups.rates()[name]

    def _saved(self) -> "SavedTraining":
        """Return what saves and loads this training, with every operation over.

        Raises:
            RefusedError: the training has ended, or a step leaves something else to the next.
        """
        self.run.need_life()
        self.run.machine.streams.drain()
        checkpoints = import_module(CHECKPOINTS)
        made: SavedTraining = checkpoints.SavedTraining.of(
            self.run.executor, self.run.module, self._groups, owners=self.run.owners
        )
        return made
