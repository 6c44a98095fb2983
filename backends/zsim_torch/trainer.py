"""Train a module by a schedule on this rank, one step at a time, in the user's own loop."""

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
from zsim.backend.document import Document
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
    units_on,
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
"""Number of steps to simulate; the prediction reports the last one."""

CHECKPOINTS = "zsim_torch.checkpoint.saved_training"
"""Imported only when a checkpoint is used: torch's checkpoint modules take a second to import."""


class Trainer:
    """Trainer of `module` on this rank; every rank creates one with an equal module.

        with Trainer(module, strategy, batch=first) as trainer:
            for batch in batches:
                loss = trainer.step(batch)

    During training the module holds no parameters: the buffers of the schedule hold them. `finish`,
    or the end of the `with` block, writes the trained parameters back to the module. If the first
    step fails, the module gets its initial parameters back. If a later step fails, or the block is
    left with an error between steps of several ranks, the module stays empty, and reading or saving
    its parameters raises an error. A module on "meta" stays on "meta".

    Attributes:
        schedule: the operations of all ranks.
        model: the simulator's description of the module; None if `source` was a schedule.
        micro_batches: number of micro-batches that `step` takes on this rank.
        steps_done: steps since the start of training, including those before a loaded checkpoint.
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
        """Check that this rank can train, then run the setup of the schedule.

        Args:
            module: trained from its current parameter values.
            source: a schedule, or a strategy or scenario to build one (`with_buckets` applies).
            units: submodules by path, or pairs of name and module, in the order of forward.
                Default: the children of an `nn.Sequential`, or the repeated blocks of any other
                module, together with the operations that its forward runs between them.
            batch: a micro-batch for measuring the units; needed to build a schedule.
            loss: function of module and batch, used to find the units. By default the module is
                called with the batch, or with its items if it is a mapping (keywords), tuple or
                list, and returns its loss or an object with a `loss`.
            reads: values that each unit is called with, as in `describe`.
            optimizer: torch's AdamW or SGD with its groups, or a rule; replaces the strategy's.
            on_step: called with the metrics of each step.
            option: settings of this rank.
            seed: seed of the delays in poison mode.

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
        resolved, parts = units_on(rank, module, chosen, schedule)
        need_runnable(schedule, program, resolved, blocking=device.type == "cpu")
        need_values_and_memory(module, schedule, program, option)
        self._groups = groups_of(schedule, module, rates, optimizer=optimizer)
        known = {name: partial(self._rate, name) for name in rates}
        self._given = given_in(schedule, option, known)
        self.micro_batches = micro_batches(schedule)
        self.steps_done, self._on_step = 0, on_step
        self._shapes = None if batch is None else shapes_of(batch)
        with initial_values(module, resolved, option.initial) as initial:
            make = partial(RankRun, rank=rank, device=device, option=option, seed=seed)
            self.run = make(module, resolved, schedule, initial=initial, parts=parts)
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

        `option.initial` gives the initial parameters; by default `seed` draws them. A rank holds
        only the shards that its schedule assigns to it, and the module stays empty: see `save`.

        Raises:
            RefusedError: as the constructor.
        """
        option = option or Option()
        made = JobModule.of(job, seed=seed)
        if option.initial is None:
            option = replace(option, initial=made.initial)
        return cls(
            made.module,
            job.written,
            units=made.units,
            on_step=on_step,
            option=option,
            seed=seed,
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The groups and constants of the schedule as a torch optimizer, for rate schedulers.

        It updates no parameters. Each step reads the learning rates of its groups, unless the
        schedule sets its own. None if the schedule updates no parameters.
        """
        return self._groups.optimizer

    @property
    def scalars(self) -> Mapping[str, float]:
        """Return host scalars by name: the number of updates and, with fp16, the loss scale."""
        return dict(self.run.executor.scalars)

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """Return the norm of the last step's gradients before clipping; None without clipping."""
        return self.run.gradient_norm()

    def step(self, *batches: object) -> torch.Tensor:
        """Train on this rank's micro-batches of one step and return the mean of their losses.

        Every rank calls it. The loss is this rank's; `average` returns the mean over all ranks.

        Raises:
            RefusedError: the number of batches is not `micro_batches`, or the training has ended.
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
        """Return the mean loss of micro-batches without training; every rank calls it.

        Units run in evaluation mode and in the format of training. Any number of batches is
        allowed. Pipeline stages that compute no loss return NaN, as in `step`; `average` returns
        the mean over all ranks. With tensor or pipeline ranks, batches must have the shapes of
        training.

        Raises:
            RefusedError: there are no batches, a batch has another shape although ranks exchange
                the outputs of units, or the training has ended.
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
        """Return the mean of `value` over the ranks that compute a loss; every rank calls it."""
        own = (float(value),) if self.run.makes_losses else ()
        return mean_over_ranks(own, self.run.device, steps=1)[0]

    def state_dict(self, beside: "Mapping[str, Stateful] | None" = None) -> dict[str, Any]:
        """Return the state of a checkpoint, for `torch.distributed.checkpoint.save`.

        Parameters and moments are tensors that this rank holds shards of. They share memory with
        the training: save them before the next step.

        Raises:
            RefusedError: the training has ended, or a step passes other state on to the next step.
        """
        return self._saved().state_dict(self.steps_done, beside or {})

    def save(
        self, path: str | PathLike[str], beside: "Mapping[str, Stateful] | None" = None
    ) -> None:
        """Write a checkpoint into the folder `path`; every rank calls it.

        `beside` is saved too: a scheduler or a data loader, for example, equal on all ranks. An
        existing checkpoint in the folder is replaced atomically once the new one is complete.

        Raises:
            CheckpointError: it cannot be written; the folder is unchanged.
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
        """Continue from the checkpoint in the folder `path`; every rank calls it.

        The checkpoint may come from any number of ranks, any ZeRO stage, or FSDP2. With
        `parameters_only` the optimizer starts anew. By default the learning rates come from the
        checkpoint, and its other constants must equal the optimizer's; with `keep_groups` the
        optimizer keeps its rates and constants. No code that the files name is run, except for
        classes that you have allowed (`torch.serialization.add_safe_globals`).

        Raises:
            CheckpointError: it is of another model or optimizer, or would run code: nothing has
                changed. Or tensors cannot be read: the training has ended.
            RefusedError: the training has ended, or a step passes other state on to the next step.
        """
        saved = self._saved()
        plan = saved.plan(
            Path(path), beside or {}, parameters_only=parameters_only, keep_groups=keep_groups
        )
        with self.run.guarded():
            self.steps_done = saved.read(plan)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return every full parameter by name, on the CPU; the master copy if there is one.

        Every rank calls it.
        """
        self.run.machine.streams.drain()
        return self.run.full_parameters()

    def trace(self) -> Trace:
        """Return the events of this rank with their times, and the observed figures.

        Raises:
            RefusedError: `Option(keep_trace=True)` was not set.
        """
        self.run.machine.streams.drain()
        return self.run.trace()

    def write_trace(self, path: str | PathLike[str]) -> None:
        """Write the events of all ranks to one file, for `check --against`; every rank calls it.

        The first rank writes the file. Each rank's times count from the start of its own first
        step.

        Raises:
            RefusedError: `Option(keep_trace=True)` was not set, or the file cannot be written.
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

        Each rank that calls it simulates on its own. The training is not affected. Rows of experts
        on several ranks are balanced.

        Raises:
            RefusedError: the trainer was given a schedule, which does not describe kernels.
            MistakeError: the cluster cannot run it.
        """
        if self.model is None:
            raise RefusedError(
                "simulate: the trainer was given a schedule; give a strategy, so "
                "that the module is described"
            )
        described = Document(schedule=self.schedule, model=self.model, cluster=cluster, steps=steps)
        return zsim.run(described.job())

    def finish(self) -> None:
        """End the training: check that ranks issued the same collectives, and refill the module.

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
        """End the training, or abort it after an error."""
        if error is not None:
            self.run.give_up(error)
        elif not self.run.has_ended:
            self.finish()

    def _rate(self, name: str, _: int) -> float:
        return self._groups.rates()[name]

    def _saved(self) -> "SavedTraining":
        """Return the object that saves and loads this training, after waiting for all operations.

        Raises:
            RefusedError: the training has ended, or a step passes other state on to the next step.
        """
        self.run.need_life()
        self.run.machine.streams.drain()
        checkpoints = import_module(CHECKPOINTS)
        made: SavedTraining = checkpoints.SavedTraining.of(
            self.run.executor,
            self.run.module,
            self._groups,
            owners=self.run.owners,
            experts=self.run.parts,
        )
        return made
