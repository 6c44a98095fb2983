"""Runs of the executor in this process: vector clocks, what is issued and stays, values, poison.

A run on the pretended device (its code for CUDA) is judged by the recording: hazards of streams and
of the allocator, collectives as the schedule has them, and no memory left by a step but what is
persistent. A run on the CPU is judged by a plain loop, in poison mode, with storages observed; that
of a trainer that nobody watches by a plain loop and by storages that live.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple
from unittest.mock import patch

import torch
from crossed_streams import crossed
from pinned_by_hand import FIRST, lent, pinned
from recorded_executor import recorded, recorded_schedule
from shared_gradients import by_adding
from tiny_training import BOUND, Case, Middle, by_plain_loop, by_schedule, distance
from torch import nn
from torch.nn import functional
from unwatched_training import by_trainer, moving, scheduled

from faults.judge import Known, NamedRun
from faults.of_executor.patches import (
    ADDING,
    ALONE,
    CROSSED,
    DROPPED,
    LENT,
    MOVED,
    NVME,
    PINNED,
    PLAIN,
    SLICED,
    STAYING,
    VALUES,
    Plant,
    by_checker,
    check_reached,
)
from faults.of_executor.recorded_jobs import job
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Branch,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    FreeMode,
    Operation,
    ReduceScatter,
    Reduction,
    StreamOperation,
    Together,
    walk,
)
from zsim.schedule.schedule import Place, Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_record.record.pretended_streams import PretendedStream
from zsim_record.record.tape import Tape, UnrecordableError
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.module.unit import resolve

KIND: dict[type[Communication], str] = {
    AllGather: "allgather_base",
    ReduceScatter: "reduce_scatter_base",
    AllReduce: "allreduce",
    Broadcast: "broadcast",
}
REDUCTION = {Reduction.SUM: "sum", Reduction.AVERAGE: "avg", Reduction.MAX: "max"}
STEPS = 3
LATE_S, VERY_LATE_S = 2e-3, 5e-2
"""How late operations of a thread are; later where there are few, for the host may be slow."""
Issued = tuple[str, int, str]
"""Kind, elements of the whole tensor, and reduction of a collective."""


def case(
    offload: Offload | None = None,
    *,
    stage: int = 3,
    checkpointing: Checkpointing = Checkpointing.NONE,
) -> Case:
    """A module of one rank whose gradients add up, are clipped, and go through Adam."""
    return Case(
        Strategy(
            parallel=Parallel(data=1),
            zero=Zero(stage=stage, bucket_elements=60),
            offload=offload or Offload(),
            activations=Activations(checkpointing=checkpointing),
            train=Train(
                optimizer=Adam(learning_rate=0.01, epsilon=1e-5),
                clip_norm=0.05,
                gradient_accumulation_steps=2,
            ),
        ),
        steps=3,
        observe=True,
        poison=True,
    )


CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    VALUES: (case(), ("",)),
    PLAIN: (replace(case(), poison=False), ("",)),
    STAYING: (replace(case(stage=1), poison=False), ("",)),
    SLICED: (case(), ("",)),
    DROPPED: (case(checkpointing=Checkpointing.FULL), ("",)),
    NVME: (
        case(Offload(optimizer=MemoryTier.NVME, parameters=MemoryTier.NVME, sub_group_elements=7)),
        ("cpu", "nvme_read", "nvme_write"),
    ),
}
"""What is trained, and the streams that are late, in a run for each."""


def sliced(middle: Middle, hidden: torch.Tensor) -> torch.Tensor:
    """Do what the layer does with two slices of its weight, which autograd saves."""
    low, high = middle.linear.weight[:2], middle.linear.weight[2:]
    return torch.tanh(torch.cat([hidden @ low.T, hidden @ high.T], -1) + middle.linear.bias)


def dropping(middle: Middle, hidden: torch.Tensor) -> torch.Tensor:
    """Drop half of what the layer makes."""
    return functional.dropout(torch.tanh(middle.linear(hidden)), 0.5)


Forward = Callable[[Middle, torch.Tensor], torch.Tensor]
FORWARD: dict[str, Forward] = {SLICED: sliced, DROPPED: dropping}
"""Things that the layer of a run does instead."""


class Judged(NamedTuple):
    """The fault found in a run, nothing if there is none, and the bytes that lived at most."""

    found: str
    most_bytes: int = 0


@dataclass(frozen=True)
class LocalRun(NamedRun):
    """A run of the executor in this process: a job of the judge."""

    def findings(self, made: Plant) -> dict[str, list[str]]:
        """Return findings by checker, with a plant."""
        return self.planted([made])

    def truth(self, made: Plant, _: object) -> Known:
        """Return that a plant is wrong, unless nobody can see a difference."""
        return Known(is_wrong=not made.same)

    def planted(self, plants: Sequence[Plant], *, unchanged: bool = False) -> dict[str, list[str]]:
        """Return findings by checker, with plants, each of which has to be reached.

        Raises:
            UnrecordableError: this process cannot record any more.
        """
        with ExitStack() as stack:
            inside = [(each, each.inside(unchanged=unchanged)) for each in plants]
            entered = [(each, stack.enter_context(one)) for each, one in inside]
            judged = _judged_whatever(self.label)
        check_reached(plants, {each.id for each, reached in entered if reached.count})
        found = judged.found
        if not found and plants and judged.most_bytes > bytes_of(self.label):
            found = f"memory: a peak of {judged.most_bytes} bytes, not {bytes_of(self.label)}"
        return by_checker(found)


def _judged_whatever(run: str) -> Judged:
    """Judge a run; one that fails is found."""
    try:
        return _judged(run)
    except UnrecordableError as error:
        if "in this process" in str(error):
            raise
        return Judged(f"error: UnrecordableError: {str(error)[:60]}")
    except Exception as error:
        return Judged(f"error: {type(error).__name__}: {str(error)[:60]}")


@cache
def bytes_of(run: str) -> int:
    """Return the bytes that live at most in a run; nothing may be planted."""
    judged = _judged(run)
    assert not judged.found
    return judged.most_bytes


def _judged(run: str) -> Judged:
    if run in CASES:
        trained, streams = CASES[run]
        found = [by_values(trained, each, FORWARD.get(run)) for each in streams]
        return next((each for each in found if each.found), found[0])
    if run in (ALONE, MOVED):
        return Judged(*by_trainer(scheduled if run == ALONE else moving))
    if run == ADDING:
        return Judged(by_adding())
    if run == PINNED:
        return Judged(next(filter(None, map(by_threads, ("writer", "reader", "filler"))), ""))
    if run in (CROSSED, LENT):
        judged = crossed() if run == CROSSED else lent()
        steps = Steps(judged)
        return steps.judged(recorded_schedule(judged, steps=STEPS, on_step=steps.look))
    name, _, how = run.partition(", ")
    made = job(name)
    steps = Steps(made.schedule)
    traced, has_caller = how == "traced", how == "with a caller"
    return steps.judged(
        recorded(made, keeps_trace=traced, has_caller=has_caller, on_step=steps.look)
    )


@dataclass
class Steps:
    """What steps of a recording leave, and what they have used."""

    schedule: Schedule
    left: list[int] = field(default_factory=list[int])
    idle: set[str] = field(default_factory=set[str])

    def look(self, tape: Tape, executor: Executor) -> None:
        """Note what is alive, and streams that have run nothing at all."""
        gc.collect()
        tape.begin_operation()
        self.left.append(tape.live_bytes)
        streams: dict[str, PretendedStream] = vars(executor.machine.streams)["_streams"]
        lines = {name: each.timeline for name, each in streams.items()}
        self.idle = {name for name, line in lines.items() if not line.clock[line.number]}

    def judged(self, tape: Tape) -> Judged:
        """Judge a recording."""
        return Judged(self.verdict(tape), tape.peak_bytes)

    def verdict(self, tape: Tape) -> str:
        """Return what is wrong, if anything is."""
        if tape.findings:
            return f"clocks: {', '.join(sorted({each.kind.value for each in tape.findings}))}"
        if tape.refused:
            return f"refused: {next(iter(tape.refused))}"
        if issued(tape) != demanded(self.schedule, len(self.left)):
            return "collectives: not those of the schedule"
        if self.idle & busy_streams(self.schedule):
            return f"streams: nothing runs on {min(self.idle)}"
        least = persistent_bytes(self.schedule)
        most = least + deferred_bytes(self.schedule)
        if len(set(self.left)) > 1 or not least <= self.left[0] <= most:
            return f"memory: steps leave {self.left} bytes, not {least} to {most}"
        return ""


def busy_streams(schedule: Schedule) -> set[str]:
    """Streams that a step of rank 0 has operations on."""
    operations = walk(schedule.program_of(0).step)
    return {each.stream for each in operations if isinstance(each, StreamOperation)}


def issued(tape: Tape) -> Counter[tuple[tuple[int, ...], tuple[Issued, ...]]]:
    """What each communicator was given, in order, by its ranks."""
    return Counter(
        (each[0].ranks, tuple((one.kind, max(one.sizes), one.detail) for one in each))
        for each in tape.collectives.values()
    )


def demanded(schedule: Schedule, steps: int) -> Counter[tuple[tuple[int, ...], tuple[Issued, ...]]]:
    """What a schedule says that rank 0 gives to each; branches read 1."""
    found: dict[str, list[Issued]] = {}
    program = schedule.program_of(0)
    for part in (program.setup, *[program.step] * steps):
        for one in communications(part):
            reduction = getattr(one, "reduction", None)
            detail = "" if reduction is None else REDUCTION[reduction]
            found.setdefault(one.group, []).append((KIND[type(one)], one.whole.size, detail))
    own = schedule.mesh.coordinates(0)
    return Counter(
        (schedule.group_by_name[name].members(schedule.mesh, own), tuple(each))
        for name, each in found.items()
    )


def communications(operations: Iterable[Operation]) -> Iterator[Communication]:
    """Yield the collectives of a list, those of `then` of its branches too."""
    for operation in operations:
        match operation:
            case Branch(then=then):
                yield from communications(then)
            case Together(members=members):
                yield from members
            case Communication():
                yield operation
            case _:
                pass


def persistent_bytes(schedule: Schedule) -> int:
    """Bytes on the device that a step leaves to the next one."""
    program = schedule.program_of(0)
    on_device = {pool.name for pool in schedule.pools if pool.place is Place.DEVICE}
    buffers = (program.by_name[name] for name in program.persistent)
    return sum(each.size_bytes for each in buffers if each.pool in on_device)


def deferred_bytes(schedule: Schedule) -> int:
    """Bytes whose memory may come back in the next step: nothing is allocated after their free."""
    program = schedule.program_of(0)
    return sum(
        program.by_name[each.buffer].size_bytes
        for each in walk(program.step)
        if isinstance(each, Free) and each.mode is FreeMode.DEFERRED
    )


@contextmanager
def late(stream: str, seconds: float = LATE_S) -> Generator[None]:
    """Let every operation on one stream that is a thread of the host be late."""
    right = vars(Executor)["_for_thread"]

    def slowed(executor: Executor, operation: Compute | Fill | Copy) -> Callable[[], None]:
        action: Callable[[], None] = right(executor, operation)
        if operation.stream != stream:
            return action

        def slow() -> None:
            time.sleep(seconds)
            action()

        return slow

    with patch.object(Executor, "_for_thread", slowed):
        yield


def by_threads(stream: str) -> str:
    """Judge what threads of the host leave, where memory is taken again."""
    schedule, device = pinned(), torch.device("cpu")
    (program,) = schedule.programs
    pools = HostPools(schedule, program, folder=Path(gettempdir()), device=device, poison=False)
    bench = Bench(schedule, program, rank=0, device=device, observer=None, pools=pools)
    with bench, late(stream, VERY_LATE_S):
        executor = bench.executor(
            resolve(nn.Identity(), ("",)),
            initial=dict[str, torch.Tensor]().__getitem__,
            next_batch=lambda: None,
            on_loss=lambda _: None,
            on_norm=lambda *_: None,
            poison=Poison(None),
        )
        executor.run_setup()
        executor.run_step(0, {})
        executor.machine.streams.drain()
        left = [executor.machine.memory.left(name) for name in program.persistent]
    pools.close()
    right = all(bool((each == FIRST).all()) for each in left)
    return "" if right else "values: not those that were written first"


def by_values(judged: Case, stream: str = "", forward: Forward | None = None) -> Judged:
    """Judge the executor on the CPU by a plain loop, and by storages that live."""
    with patch.object(Middle, "forward", forward or Middle.forward):
        with late(stream):
            found = by_schedule(judged)
        before, parameters, losses = by_plain_loop(judged)
    observed = found.observed
    most = int(observed["live_bytes_peak/all"])
    if not distance(found.parameters, parameters, before) <= BOUND[judged.strategy.train.precision]:
        return Judged("values: not those of a plain loop", most)
    if not all(
        abs(one - other) <= 1e-5 * abs(other)  # not so either of what is no number
        for one, other in zip(found.losses, losses, strict=True)
    ):
        return Judged("values: other losses than a plain loop", most)
    booked = observed["booked_bytes_peak/state"]
    if (live := observed["live_bytes_peak/state"]) != booked:
        return Judged(f"memory: {live} bytes live, {booked} are booked", most)
    return Judged("", most)
