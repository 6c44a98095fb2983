"""A trace in the format of PyTorch's profiler (Kineto), which Perfetto and other tools read.

Times are microseconds. A process is a rank, a thread one of its streams. Names identify the kind of
kernel, as in CUDA and NCCL: `ncclDevKernel_...` communicates, `Memcpy` and `Memset` move or set
memory, all others compute. Holistic Trace Analysis uses the same distinction. `args` has the data
of a collective, under the names of PyTorch's profiler.
"""

from collections.abc import Iterable, Iterator
from typing import assert_never

from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    SetScalar,
    Together,
    View,
)
from zsim.schedule.schedule import Place, Program, Schedule
from zsim.trace.trace import RankTrace, Trace

PICOSECONDS_PER_MICROSECOND = 10**6
FIRST_STREAM = 7
"""PyTorch's compute stream has this number in traces; the other streams follow."""
HOST = 0
"""The thread on which steps are marked and kernels are launched."""
LAUNCH = "cudaLaunchKernel"

Json = dict[str, object]

KEYS = ("schemaVersion", "distributedInfo", "displayTimeUnit", "traceName", "traceEvents")
"""Keys of the object that `kineto` returns."""


def kineto(schedule: Schedule, trace: Trace, rank: RankTrace) -> Json:
    """Return the events of `rank`, as the object that PyTorch's profiler writes into a file."""
    program = schedule.program_of(rank.rank)
    return {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": trace.backend,
            "rank": rank.rank,
            "world_size": schedule.mesh.size,
        },
        "displayTimeUnit": "ms",
        "traceName": f"{schedule.name}, rank {rank.rank}",
        "traceEvents": [
            *_names(schedule, rank),
            *_steps(trace, rank.rank),
            *_operations(schedule, program, rank),
        ],
    }


def _names(schedule: Schedule, rank: RankTrace) -> Iterator[Json]:
    """Yield the names of the rank and its streams for Perfetto."""
    like = f" and {rank.stands_for - 1:,} like it" if rank.stands_for > 1 else ""
    names = {HOST: "host"} | {number: name for name, number in _numbers(schedule).items()}
    yield _name("process_name", rank.rank, HOST, f"rank {rank.rank}{like}")
    for number, name in names.items():
        yield _name("thread_name", rank.rank, number, name)


def _name(what: str, rank: int, thread: int, name: str) -> Json:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _numbers(schedule: Schedule) -> dict[str, int]:
    return {name: FIRST_STREAM + index for index, name in enumerate(schedule.streams)}


def _steps(trace: Trace, rank: int) -> Iterator[Json]:
    """Yield each step from the previous one's end to its own, as marked by PyTorch's profiler."""
    begin_ps = 0
    for number, end_ps in enumerate(trace.step_end_ps):
        what = ("user_annotation", f"ProfilerStep#{number}")
        yield _span(what, (rank, HOST), (begin_ps, end_ps), {})
        begin_ps = end_ps


def _span(
    what: tuple[str, str], where: tuple[int, int], when_ps: tuple[int, int], arguments: Json
) -> Json:
    """Return an event with a duration: category and name, rank and thread."""
    start, end = (time / PICOSECONDS_PER_MICROSECOND for time in when_ps)
    return {
        "ph": "X",
        "cat": what[0],
        "name": what[1],
        "pid": where[0],
        "tid": where[1],
        "ts": start,
        "dur": end - start,
        "args": arguments,
    }


def _operations(schedule: Schedule, program: Program, rank: RankTrace) -> Iterator[Json]:
    """Yield every operation and its launch, which assigns it to a step.

    A trace has no host times, so a launch has the start time of its operation.
    """
    numbers = _numbers(schedule)
    for index, event in enumerate(rank.events):
        operation = program.by_id[event.operation]
        category, name = _kernel(schedule, program, operation)
        yield _span(
            ("cuda_runtime", LAUNCH),
            (rank.rank, HOST),
            (event.start_ps, event.start_ps),
            {"correlation": index + 1},
        )
        yield _span(
            (category, name),
            (rank.rank, numbers[event.stream]),
            (event.start_ps, event.end_ps),
            {
                "stream": numbers[event.stream],
                "device": rank.rank,
                "correlation": index + 1,
                "operation": event.operation,
                "step": event.step,
                **_carried(schedule, operation),
            },
        )


LETTER = {Place.DEVICE: "D", Place.HOST: "H", Place.NVME: "F"}
"""Letters of places in names of copies, as in CUPTI; F is a file."""


def _kernel(schedule: Schedule, program: Program, operation: Operation) -> tuple[str, str]:
    """Return category and name of the work on the stream."""
    match operation:
        case Compute(action=action, unit=unit):
            return "kernel", f"{unit} {action}".strip()
        case Communication() | Together():
            kinds = dict.fromkeys(type(each).__name__ for each in _members(operation))
            return "kernel", f"ncclDevKernel_{'_'.join(kinds)}"
        case Copy():
            views = (operation.source, operation.target)
            letters = "to".join(LETTER[_place(schedule, program, view.buffer)] for view in views)
            return "gpu_memcpy", f"Memcpy {letters}"
        case Fill():
            return "gpu_memset", "Memset (Device)"
        case Allocate() | Free() | HostWait() | SetScalar() | Branch():
            raise AssertionError(f"{operation.id}: an action of the host is on no stream")
        case _:
            assert_never(operation)


def _members(operation: Communication | Together) -> tuple[Communication, ...]:
    return operation.members if isinstance(operation, Together) else (operation,)


def _place(schedule: Schedule, program: Program, buffer: str) -> Place:
    pool = program.by_name[buffer].pool
    return next(each.place for each in schedule.pools if each.name == pool)


def _carried(schedule: Schedule, operation: Operation) -> Json:
    """Return the data of a collective, with PyTorch's names in a profile of NCCL."""
    if not isinstance(operation, Communication | Together):
        return {}
    members = _members(operation)
    group = schedule.group_by_name[operation.group]
    return {
        "Collective name": members[0].__class__.__name__,
        "Process Group Name": operation.group,
        "Group size": group.size(schedule.mesh),
        "dtype": str(members[0].wire),
        "In msg nelems": _elements(each.reads for each in members),
        "Out msg nelems": _elements(each.writes for each in members),
    }


def _elements(views: Iterable[View | None]) -> int:
    return sum(view.size for view in views if view is not None)
