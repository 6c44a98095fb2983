"""Train a module by a schedule, as one rank of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
from torch import distributed, nn
from torch.utils._pytree import tree_map

from zsim.backend.backend import RefusedError, RunFailedError
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import Trace
from zsim_torch import capability as refusal
from zsim_torch.execute import blocking_host
from zsim_torch.execute.agreement import agree
from zsim_torch.execute.compute import Initial
from zsim_torch.execute.executor import Executor, Given, RankMachine, sighting_of
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.poison import Poison, Sighting
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.execute.run_state import leave_state, lost_state
from zsim_torch.execute.whole_parameters import collect
from zsim_torch.loss_journal import StepLosses
from zsim_torch.module.absent import emptied, is_emptied, refill_module
from zsim_torch.module.unit import TorchUnit, UnitChoice, resolve
from zsim_torch.observe.observer import Observer
from zsim_torch.observe.recorder import Recorder
from zsim_torch.rank_result import mean_over_ranks, observed_by, trace_of
from zsim_torch.supervise.process_group import DeviceError, backends, rank_device
from zsim_torch.supervise.progress_record import note, step_done


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Settings of a run on one rank.

    Attributes:
        device: where the rank computes; by default where the module is if that is a GPU, or the
            current GPU if the process group has NCCL for it, else the CPU.
        initial: the initial value of a parameter, by name; by default what the module holds.
        observe: watch live storages and collectives; each operator takes a little longer.
        witness: record what torch is seen to do (`zsim.trace.witness`); each operator takes longer.
        poison: fill freed and not yet valid memory with what is no number, and run late at random.
        write_back: the module ends with the trained parameters; else it keeps none. If the run
            raises, it has those that it came with, which stay in host memory meanwhile.
        given: by name of a host scalar what the caller gives in it before each step, counted from
            0: a learning rate. By default the strategy's learning rates, if it says some.
        journal: a file that gets the loss of each step when it has ended; on a GPU a step later, so
            that the host need not wait.
        offload_path: folder of the files that stand for NVMe; by default that of temporary files.
        device_budget: bytes that may live at a time, but for pools of host memory; None for any.
        restart: moments and loss scale may begin anew although an earlier run has trained the
            module; they are not kept between two calls of `train`.
    """

    device: torch.device | None = None
    initial: Initial | None = None
    observe: bool = True
    witness: bool = False
    poison: bool = False
    write_back: bool = True
    given: Given = field(default_factory=dict[str, Callable[[int], float]])
    journal: Path | None = None
    offload_path: Path | None = None
    device_budget: int | None = None
    restart: bool = False


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
    for each LOAD. `seed` seeds the delays of poison mode.

    Raises:
        RefusedError: the schedule or the units cannot be run, or an earlier run of the module had
            optimizer state that this one would begin anew; nothing was started.
        UnitError: the units do not make up the module.
        DivergedError: two ranks issued different operations as one collective.
    """
    chosen = _with_given(schedule, option or Option())
    rank, device = _place(schedule, module, chosen)
    resolved = resolve(module, units)
    program = schedule.program_of(rank)
    refuse(schedule, program, resolved, blocking=device.type == "cpu")
    _refuse_memory(schedule, program, chosen)
    _refuse_module(module, program, chosen)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    with emptied(module, keep=chosen.write_back) as taken:
        recorder, losses = Recorder() if chosen.witness else None, StepLosses(chosen.journal, rank)
        with _bench(schedule, rank, device, chosen) as bench:
            executor = bench.executor(
                resolved,
                initial=chosen.initial or taken.__getitem__,
                next_batch=_feed(batches, device),
                on_loss=losses.add,
                on_issue=recorder.mark if recorder is not None else None,
                poison=Poison(np.random.default_rng((seed, rank)) if chosen.poison else None),
            )
            executor.given = chosen.given
            watching = (recorder, bench.observer)
            origin = _run(executor, watching, taken, losses, steps=steps)
            agree(schedule, executor.transfers)
            trace = trace_of(executor, recorder, losses, steps=steps, seed=seed, origin=origin)
            trained = Trained(
                losses=mean_over_ranks(losses.means(), device),
                trace=replace(trace, observed=observed_by(bench, executor)),
                scalars=dict(executor.scalars),
                sighting=sighting_of(executor, losses.means()) if chosen.poison else None,
                _collect=lambda: _whole(executor.machine, shapes),
                _close=bench.pools.close,
            )
            whole = trained.full_parameters() if chosen.write_back else {}
    if chosen.write_back:
        refill_module(module, whole)
    leave_state(module, program)
    return trained


def refuse(
    schedule: Schedule, program: Program, units: Sequence[TorchUnit], *, blocking: bool
) -> None:
    """Return if this rank can run `program` on `units`; `blocking` where the host is the stream.

    Raises:
        RefusedError: it cannot; one line says why.
    """
    reason = refusal.of_schedule(schedule) or refusal.of_units(schedule, program, units)
    if reason is None:
        judge = blocking_host.refusal if blocking else refusal.of_device_reads
        reason = judge(schedule)
    if reason is not None:
        raise RefusedError(reason)


def _refuse_memory(schedule: Schedule, program: Program, option: Option) -> None:
    """Return if there is what `program` needs of a device and of files, as `option` has them.

    Raises:
        RefusedError: there is not.
    """
    reason = refusal.of_memory(
        schedule,
        (program,),
        witness=option.witness,
        offload_path=option.offload_path,
        device_budget=option.device_budget,
    )
    if reason is not None:
        raise RefusedError(reason)


def _bench(schedule: Schedule, rank: int, device: torch.device, option: Option) -> Bench:
    """Return memory, streams and communicators of a rank, watched as `option` says."""
    program = schedule.program_of(rank)
    watched = option.observe or option.device_budget is not None
    folder = option.offload_path or Path(gettempdir())
    return Bench(
        schedule,
        program,
        rank=rank,
        device=device,
        observer=Observer(option.device_budget) if watched else None,
        pools=HostPools(schedule, program, folder=folder, device=device, poison=option.poison),
    )


def _with_given(schedule: Schedule, option: Option) -> Option:
    """Return the settings with all that is given in host scalars before each step, and no more.

    Raises:
        RefusedError: nobody says what is given in one of them.
    """
    found = {**given_by_strategy(schedule), **option.given}
    wanted = [scalar.name for scalar in schedule.scalars if scalar.given]
    if missing := [name for name in wanted if name not in found]:
        raise RefusedError(f"given: {missing[0]}: missing; its number for each step is needed")
    return replace(option, given={name: found[name] for name in wanted})


def given_by_strategy(schedule: Schedule) -> Given:
    """Return the learning rates that the contract's strategy says, by host scalar."""
    strategy = schedule.contract.strategy
    if strategy is None or strategy.train.learning_rates is None:
        return {}
    rate = strategy.train.optimizer.learning_rate
    return {rate: strategy.train.learning_rates.at} if isinstance(rate, str) else {}


def _refuse_module(module: nn.Module, program: Program, option: Option) -> None:
    """Return if `module` has what a run of `program` begins with.

    Raises:
        RefusedError: its parameters have no values, or an earlier run left state that is gone.
    """
    if option.initial is None:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise RefusedError("module: its parameters have no values, and `initial` is not given")
        if any(is_emptied(parameter) for parameter in module.parameters()):
            raise RefusedError(
                "module: an earlier run with write_back=False left it no parameters, and `initial` "
                "is not given"
            )
    lost = () if option.restart else lost_state(module, program, given=option.initial is not None)
    if lost:
        raise RefusedError(
            f"module: an earlier run trained it, and its {' and '.join(lost)} would begin anew; "
            "train once with more steps, or say Option(restart=True)"
        )


def _place(schedule: Schedule, module: nn.Module, option: Option) -> tuple[int, torch.device]:
    """Return this rank's number and device.

    Raises:
        RefusedError: the process group is not the one of the schedule, or not for the device.
    """
    joined = distributed.is_initialized()
    rank = distributed.get_rank() if joined else 0
    ranks = distributed.get_world_size() if joined else 1
    if ranks != schedule.mesh.size:
        raise RefusedError(f"ranks: the schedule is for {schedule.mesh.size}, here are {ranks}")
    current = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    )
    held = {parameter.device for parameter in module.parameters()}
    try:
        return rank, rank_device(
            option.device, held, backends() if joined else None, current=current
        )
    except DeviceError as error:
        raise RefusedError(str(error)) from error


def _feed(batches: Iterable[object], device: torch.device) -> Callable[[], object]:
    """Return a function that gives the next micro-batch, on `device`."""
    source = iter(batches)

    def move(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.device != device:
            return value.to(device, non_blocking=True)
        return value

    def give() -> object:
        try:
            batch = next(source)
        except StopIteration:
            raise RunFailedError("batches: they ended before the last step") from None
        return tree_map(move, batch) if device.type == "cuda" else batch

    return give


def _whole(machine: RankMachine, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return every parameter by name, in its shape if it has one."""
    return {
        name: each.view(shapes.get(name, each.shape)) for name, each in collect(machine).items()
    }


def _run(
    executor: Executor,
    watching: tuple[Recorder | None, Observer | None],
    taken: dict[str, torch.Tensor],
    losses: StepLosses,
    *,
    steps: int,
) -> int:
    """Run setup and all steps; returns when the first step began. `taken` is empty after setup."""
    recorder, observer = watching
    with recorder or nullcontext(), observer or nullcontext():
        executor.run_setup()
        taken.clear()
        if distributed.is_initialized():
            distributed.barrier()
        if observer is not None:
            observer.traffic.clear()
        executor.machine.memory.setting.pools.forget_traffic()
        origin = executor.machine.streams.now()
        for step in range(steps):
            losses.begin_step()
            executor.run_step(step)
            step_done(step + 1)
        losses.note()
        executor.machine.streams.drain()
    note("the last step is over")
    return origin
