"""Collect the results of a run on its rank: losses, observed figures and the trace."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from zsim.backend.backend import RefusedError
from zsim.backend.document import Document, encode, encode_trace
from zsim.memory import peak_bytes
from zsim.model.model import Model
from zsim.schedule.operation import BACKWARDS, Compute, Role, walk
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.kineto import kineto
from zsim.trace.trace import LedgerEntry, RankTrace, Trace
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.loss_journal import StepLosses
from zsim_torch.observe.recorder import Recorder


def observed_by(bench: Bench, executor: Executor) -> tuple[tuple[str, float], ...]:
    """Return the observed figures, and the schedule's figures for the same storages."""
    if bench.observer is None:
        return ()
    ledger = executor.ledger.entries
    on_device = [entry for entry in ledger if not bench.pools.has(entry.pool)]
    return (
        *bench.observer.figures(),
        ("booked_bytes_peak/state", state_peak(bench.program, on_device)),
        ("shared_bytes_peak/gradient", executor.machine.computer.shared_bytes_peak),
        *bench.pools.figures(),
        *(
            (f"booked_bytes_peak/pool/{name}", peak_bytes(ledger, name))
            for name in bench.pools.names
        ),
    )


def state_peak(program: Program, ledger: Iterable[LedgerEntry]) -> int:
    """Return the peak bytes of buffers of the executor and gradients of autograd.

    These are all buffers except activations and batches.
    """
    made = {
        operand.view.buffer
        for operation in walk(program.step)
        if isinstance(operation, Compute) and operation.action in BACKWARDS
        for operand in operation.operands
        if operand.role in (Role.GRADIENT, Role.INPUT_GRADIENT)
    }
    alive = peak = 0
    for entry in ledger:
        if entry.buffer in made or not program.by_name[entry.buffer].produced:
            alive += entry.change_bytes
            peak = max(peak, alive)
    return peak


def trace_of(
    executor: Executor,
    recorder: Recorder | None,
    losses: StepLosses,
    *,
    steps: int,
    seed: int,
    origin: int,
) -> Trace:
    """Return the trace of this rank alone, with times since `origin`: the start of step 0."""
    machine = executor.machine
    events = machine.streams.events(origin)
    ends = [0] * steps
    for event in events:
        if event.step >= 0:
            ends[event.step] = max(ends[event.step], event.end_ps)
    own = RankTrace(
        rank=machine.schedule.mesh.rank(machine.coordinates),
        role=machine.program.role,
        stands_for=1,
        events=tuple(events),
        book=tuple(executor.ledger.entries),
        transfers=tuple(executor.ledger.transfers),
        losses=losses.means(),
        witness=recorder.witness() if recorder is not None else None,
        rows=executor.counted.received_rows(),
    )
    return Trace(
        backend="torch",
        schedule=machine.schedule.name,
        seed=seed,
        steps=steps,
        ranks=(own,),
        step_end_ps=tuple(ends),
        error_text="measured",
    )


def mean_over_ranks(
    losses: tuple[float, ...], device: torch.device, *, steps: int
) -> tuple[float, ...]:
    """Return the mean of each loss over the ranks that have `steps` losses; every rank calls it.

    In a pipeline only the last stage has losses.
    """
    if not distributed.is_initialized():
        return losses
    own = [*losses, 1.0] if len(losses) == steps else [0.0] * (steps + 1)
    total = torch.tensor(own, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    *sums, count = total.tolist()
    return tuple(each / count for each in sums) if count else ()


def write_together(schedule: Schedule, own: Trace, path: Path) -> None:
    """Write the traces of all ranks to one file; every rank passes its own, the first one writes.

    Raises:
        RefusedError: the file cannot be written; raised on every rank.
    """
    traces = [own]
    if distributed.is_initialized():
        found: list[Trace | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, own)
        traces = [each for each in found if each is not None]
    whole = merged(traces)
    is_first = own.ranks[0].rank == whole.ranks[0].rank
    text = encode_trace(whole, kineto(schedule, whole, whole.ranks[0])) if is_first else ""
    _write("trace", text, path, is_first=is_first)


def write_schedule(schedule: Schedule, model: Model | None, path: Path) -> None:
    """Write a schedule as JSON, with its model if it is known; every rank calls it.

    Raises:
        RefusedError: the file cannot be written; raised on every rank.
    """
    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    text = encode(Document(schedule=schedule, model=model)) if is_first else ""
    _write("schedule", text, path, is_first=is_first)


def _write(what: str, text: str, path: Path, *, is_first: bool) -> None:
    """Write `text` on the first rank; raise RefusedError on every rank if that fails."""
    failures = [""]
    if is_first:
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            failures = [f"{what}: {path}: {error.strerror or error}"]
    if distributed.is_initialized():
        distributed.broadcast_object_list(failures, src=0)
    if failures[0]:
        raise RefusedError(failures[0])


def merged(traces: Sequence[Trace]) -> Trace:
    """Merge the traces of each rank into one; take the maximum of each observed figure."""
    first = traces[0]
    figures: dict[str, float] = {}
    for trace in traces:
        for name, number in trace.observed:
            figures[name] = max(figures.get(name, number), number)
    return replace(
        first,
        ranks=tuple(one for trace in traces for one in trace.ranks),
        step_end_ps=tuple(max(ends) for ends in zip(*(t.step_end_ps for t in traces), strict=True)),
        observed=tuple(figures.items()),
    )
