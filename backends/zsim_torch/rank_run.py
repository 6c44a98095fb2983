"""Run a schedule on this rank: its memory, its observers, and the emptied module.

The module gets its parameters back when the run has ended or failed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
from torch import distributed, nn
from torch.utils._pytree import tree_map

from zsim.backend.backend import RefusedError
from zsim.schedule.operation import Compute, walk
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import Trace
from zsim.zero.names import DATA, EXPERT
from zsim_torch.equal_start import NotedValues, need_equal_start
from zsim_torch.execute.agreement import agree
from zsim_torch.execute.executor import Executor, RankMachine
from zsim_torch.execute.full_parameters import along, collect, holders
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.poison import NanOrigin, Poison
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.execute.run_state import leave_state
from zsim_torch.execute.shard_compute import Initial
from zsim_torch.loss_journal import StepLosses
from zsim_torch.module.absent import emptied, refill_module
from zsim_torch.module.expert_parts import ExpertParts
from zsim_torch.module.module_state import SharedBuffers, buffer_owners
from zsim_torch.module.unit import SegmentKey, TorchUnit
from zsim_torch.observe.observer import Observer
from zsim_torch.observe.recorder import Recorder
from zsim_torch.observe.watchers import unwatched
from zsim_torch.rank_result import observed_by, trace_of
from zsim_torch.run_option import Option
from zsim_torch.supervise.progress_record import note, step_done


class RankRun:
    """Run of a schedule on this rank; the constructor runs setup.

    `prepare` maps a micro-batch on the device to the inputs of units. `parts` are set if ranks hold
    different experts. In poison mode, once the run has ended, `nan_origin` names the operation that
    read invalid memory.
    """

    def __init__(  # noqa: PLR0913  (of the trainer's own)
        self,
        module: nn.Module,
        units: Sequence[TorchUnit],
        schedule: Schedule,
        *,
        rank: int,
        device: torch.device,
        option: Option,
        initial: Initial | None,
        seed: int,
        parts: ExpertParts | None = None,
    ) -> None:
        self.module = module
        self.parts = parts
        self.prepare: Callable[[object], object] | None = None
        self.units = {unit.key: unit for unit in units}
        self.schedule = schedule
        self.device = device
        self.option = option
        self.seed = seed
        self.program = schedule.program_of(rank)
        self.shapes = {name: each.shape for name, each in module.named_parameters()}
        self.steps = 0
        self.losses = StepLosses(option.journal, rank)
        self.has_ended = self.has_failed = False
        self.nan_origin: NanOrigin | None = None
        self._observed: tuple[tuple[str, float], ...] = ()
        self._norm: tuple[torch.Tensor, float] | None = None
        self._batches: Iterator[object] = iter(())
        self._recorder = Recorder() if option.witness else None
        self._life = ExitStack()
        self._buffers = SharedBuffers(module, device)
        self._life.callback(self._buffers.back)
        self.owners = buffer_owners(module, schedule, units)
        with self.guarded():
            self._taken = self._life.enter_context(emptied(module, keep=option.write_back))
            self._bench = self._life.enter_context(self._new_bench(rank))
            given = initial or self._taken.values.__getitem__
            values = NotedValues(given if parts is None else parts.cut(given))
            self.executor = self._new_executor(units, values)
            self._set_up(values, is_modules=initial is None)

    def _new_bench(self, rank: int) -> Bench:
        """Return memory, streams and communicators, observed if the option asks for it."""
        option = self.option
        watched = option.observe or option.device_budget is not None
        folder = option.offload_path or Path(gettempdir())
        return Bench(
            self.schedule,
            self.program,
            rank=rank,
            device=self.device,
            observer=Observer(option.device_budget) if watched else None,
            pools=HostPools(
                self.schedule,
                self.program,
                folder=folder,
                device=self.device,
                poison=option.poison,
            ),
        )

    def _new_executor(self, units: Sequence[TorchUnit], initial: Initial) -> Executor:
        rank = self.schedule.mesh.rank(self._bench.coordinates)
        generator = np.random.default_rng((self.seed, rank)) if self.option.poison else None
        executor = self._bench.executor(
            units,
            initial=initial,
            next_batch=self._next_batch,
            on_loss=self.losses.add,
            on_norm=self._note_norm,
            on_issue=self._recorder.mark if self._recorder is not None else None,
            poison=Poison(generator),
        )
        executor.keeps_trace = self.option.keep_trace
        executor.keeps_ledger = self.option.keep_trace or self._bench.observer is not None
        return executor

    def _set_up(self, values: NotedValues, *, is_modules: bool) -> None:
        """Run setup; then release the initial values and reset the traffic counters.

        Raises:
            RefusedError: ranks start with different values.
        """
        with self.watched():
            self.executor.run_setup()
        need_equal_start(self.schedule, self.program, self.module, values, is_modules=is_modules)
        self._taken.values.clear()
        if distributed.is_initialized():
            distributed.barrier()
        if self._bench.observer is not None:
            self._bench.observer.traffic.clear()
        self._bench.pools.forget_traffic()
        self._origin = self.executor.machine.streams.now()

    @property
    def machine(self) -> RankMachine:
        """Return the objects that the executor works with."""
        return self.executor.machine

    @property
    def makes_losses(self) -> bool:
        """Return True if this rank has the losses; only earlier pipeline stages have none."""
        last = self.executor.machine.computer.work.last
        roles = [program.role for program in self.schedule.programs if _runs(program, last)]
        return not roles or self.program.role in roles

    def step(self, batches: Sequence[object], given: Mapping[str, float]) -> None:
        """Run one step on `batches`, with the values of host scalars in `given`."""
        self.need_life()
        with self.guarded():
            with self.watched():
                self._batches, self._norm = iter(batches), None
                if not self.option.keep_trace:
                    self.losses.forget()
                self.losses.begin_step()
                self.machine.streams.follow_caller()
                self.executor.run_step(self.steps, given)
            self._share_buffers()
            self._taken.kept.clear()
            self.steps += 1
            step_done(self.steps)

    def _share_buffers(self) -> None:
        hand_out = self.machine.streams.hand_out
        if len(self.schedule.programs) == 1:
            self._buffers.share(hand_out)
        elif self.owners:
            stage = along(self.machine, DATA)
            self._buffers.share(hand_out, stage.ranks[0], stage.process_group)

    def loss(self) -> torch.Tensor:
        """Return the mean loss of this rank's micro-batches in the last step; NaN without any."""
        found = self.losses.last()
        tensors = [each for each in found if isinstance(each, torch.Tensor)]
        if not tensors:
            mean = sum(map(float, found)) / len(found) if found else float("nan")
            return torch.tensor(mean, dtype=torch.float64)
        self.machine.streams.hand_out(tensors)
        return torch.stack(tensors).mean()

    def gradient_norm(self) -> torch.Tensor | None:
        """Return the last step's gradient norm before clipping, or None if it does not clip."""
        self.machine.streams.workers.drain()  # a thread may clip
        if self._norm is None:
            return None
        squares, scale = self._norm
        self.machine.streams.hand_out([squares])
        return squares.reshape(()).sqrt() / scale

    def finish(self) -> None:
        """End the run: check that ranks issued the same collectives, and refill the module.

        Raises:
            DivergedError: two ranks issued different operations as one collective.
        """
        self.need_life()
        with self.guarded():
            with self.watched():
                self.losses.note()
                self.machine.streams.drain()
            note("the last step is over")
            agree(self.schedule, self.executor.ledger.issued)
            # Reads of files from here on, for poison and for the module, belong to no step.
            self._observed = observed_by(self._bench, self.executor)
            if self.option.poison:
                executor = self.executor
                self.nan_origin = executor.first_nan.of_run(self.losses.means(), executor.step)
            wanted = self._wanted() if self.option.write_back else {}
            whole = self._full(wanted)
            self._buffers.settle(self.owners)
        self.has_ended = True
        self._life.close()
        refill_module(self.module, whole)
        leave_state(self.module, self.program)

    def give_up(self, error: BaseException) -> None:
        """End the run after an error outside its steps.

        A rank that trains alone refills the module with its parameters. With several ranks, others
        may be inside a step, so no rank has all current parameters.
        """
        if not self.has_ended and self.steps and self.schedule.mesh.size == 1:
            with suppress(Exception):  # `error` is the one the caller sees
                self.finish()
        self.abort(error)

    def abort(self, error: BaseException) -> None:
        """Abort the run: give the module its initial parameters and release all memory."""
        if not self.has_ended:
            self.has_ended = self.has_failed = True
            self._life.__exit__(type(error), error, error.__traceback__)

    def close_files(self) -> None:
        """Delete the files of the run; `full_parameters` cannot be called afterwards."""
        self._bench.pools.close()

    def _wanted(self) -> dict[str, torch.dtype]:
        """Return the data types of the parameters that the module gets back at the end, by name."""
        named = self.module.named_parameters()
        return {name: each.dtype for name, each in named if not each.is_meta}

    def _full(self, wanted: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Return the parameters in `wanted`, each in its shape and data type in the module.

        Moments and all other persistent buffers are freed first to make room for the module. If the
        module is on "meta", `wanted` is empty on every rank.
        """
        if not wanted:
            return {}
        kept = {buffer.name for buffer in holders(self.machine)}
        for name in self.program.persistent:
            if name not in kept:
                self.machine.memory.take_away(name)
        return {
            name: each.view(self.shapes.get(name, each.shape)).to(wanted[name])
            for name, each in self._collected()
            if name in wanted
        }

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return every full parameter by name, in the module's shape if it has one.

        Every rank calls it.

        Raises:
            RefusedError: the run has failed, maybe between two updates of a step.
        """
        if self.has_failed:
            raise RefusedError("trainer: its training has failed, and no rank has its parameters")
        return {
            name: each.view(self.shapes.get(name, each.shape)) for name, each in self._collected()
        }

    def _collected(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter, flat, with the experts of all ranks; every rank calls it."""
        for name, each in collect(self.machine):
            if self.parts is None or name not in self.parts.shapes:
                yield name, each
                continue
            member = self.machine.communicators.member(EXPERT)
            own = each.to(self.device)
            found = [torch.empty_like(own) for _ in member.ranks]
            distributed.all_gather(found, own, group=member.process_group)
            yield name, torch.cat(found).cpu()

    def trace(self) -> Trace:
        """Return the events of this rank with their times, and the observed figures.

        Raises:
            RefusedError: the trace was not kept.
        """
        if not self.option.keep_trace:
            raise RefusedError("trace: not kept; say Option(keep_trace=True)")
        made = trace_of(
            self.executor,
            self._recorder,
            self.losses,
            steps=self.steps,
            seed=self.seed,
            origin=self._origin,
        )
        observed = self._observed or observed_by(self._bench, self.executor)
        return replace(made, observed=observed)

    def need_life(self) -> None:
        """Raise RefusedError if the run has ended."""
        if self.has_ended:
            raise RefusedError("trainer: its training has ended; make another one")

    def guarded(self) -> "_Guard":
        """Return a context manager that aborts the run if its block raises."""
        return _Guard(self)

    def watched(self) -> AbstractContextManager[object]:
        """Return a context manager in which the recorder and the observer see operations."""
        watching = [each for each in (self._recorder, self._bench.observer) if each is not None]
        if not watching:
            return nullcontext()
        with ExitStack() as inside:
            for each in watching:
                inside.enter_context(each)
            return inside.pop_all()

    def _note_norm(self, squares: torch.Tensor, scale: float) -> None:
        if self._norm is None:
            with unwatched():
                self._norm = (squares.clone(), scale)

    def _next_batch(self) -> object:
        return self.prepared(next(self._batches))

    def prepared(self, batch: object) -> object:
        """Return a micro-batch moved to the device and converted to the inputs of units."""
        moved = self._moved(batch)
        return moved if self.prepare is None else self.prepare(moved)

    def _moved(self, batch: object) -> object:
        device = self.device

        def move(value: object) -> object:
            if isinstance(value, torch.Tensor) and value.device != device:
                return value.to(device, non_blocking=True)
            return value

        return tree_map(move, batch) if device.type != "cpu" else batch


class _Guard:
    """Context manager that aborts a run if its block raises."""

    __slots__ = ("_run",)

    def __init__(self, run: RankRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._run.abort(error)


def _runs(program: Program, key: SegmentKey) -> bool:
    """Return True if `program` runs the segment `key`."""
    return any(
        isinstance(operation, Compute) and (operation.unit, operation.segment) == key
        for operation in walk(program.step)
    )
