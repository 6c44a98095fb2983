"""What one GPU did while it was profiled: its work, the launches, slow host calls and steps.

All times are microseconds on the clock of the file.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, cast

from zsim.mistake import MistakeError
from zsim_explain.trace.kernel_class import collective_kind, is_network, kernel_class
from zsim_explain.trace.profiler_file import RECORD

DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
RUNTIME: Final = frozenset({"cuda_runtime", "cuda_driver", "runtime"})

LOADING: Final = re.compile(r"enumerate\(DataLoader\)|data_?load|load_batch|wait_for_batch", re.I)
ALLOCATING: Final = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostRegister|HostMalloc|MemCreate|MemMap)|^cuMem"
)
WAITING: Final = re.compile(
    r"^(cuda|hip)(Stream|Device|Event)Synchronize|^(cuda|hip)Memcpy(WithStream)?$"
)

LATENCY_US: Final = 15.0
"""Least time from the launch of a kernel to its start that does not count as ordinary."""

TIMES_MEDIAN: Final = 4
"""Ordinary launches take up to this many times the median of the trace."""


class TracedCollective(NamedTuple):
    """A collective: its kind, and the group by its description, number or stream."""

    kind: str
    group: str


class DeviceWork(NamedTuple):
    """A kernel, copy or fill on the GPU."""

    start: float
    end: float
    name: str
    what: str
    """Its class: of kernels, `copy to GPU`, `copy to host`, `copy`, `fill` or `communication`."""
    correlation: int | str | None
    collective: TracedCollective | None
    pairing: tuple[str, ...]
    """Equal on all ranks of a collective: ranks of the group and number of elements."""
    waits_for: int | None = None
    """The rank that began this collective last, if this is only the wait for it."""


class HostCall(NamedTuple):
    """A call of the host that may hold up launches."""

    start: float
    end: float
    what: str


class RecordedStep(NamedTuple):
    """A step on the GPU: from the end of what the host launched before it."""

    start: float
    end: float
    name: str


ON_GPU: Final = "copy on the GPU"
"""What a copy is that neither leaves nor enters the GPU."""

LOAD, ALLOCATE, WAIT = "data loading", "memory allocation", "synchronisation"
"""Kinds of host calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRank:
    """One GPU of a trace.

    Attributes:
        path: its file.
        rank: number of its rank; 0 if the file does not say.
        world: number of ranks; None if the file does not say.
        gpu: name of the GPU; empty if the file does not say.
        work: all work of the GPU, by start.
        launches: start of the launch of each piece of work, by correlation.
        calls: host calls that may hold up launches, by start.
        steps: steps that can be judged; the first recorded one only if it is the only one.
        marked_by: what marks the steps.
        longest_call: duration of the longest of `calls`.
        latency: longest ordinary time between a launch and the start of a kernel on an idle GPU.
        skipped: events without a time.
    """

    path: Path
    rank: int
    world: int | None
    gpu: str
    work: Sequence[DeviceWork] = field(repr=False)
    launches: Mapping[int | str | None, float] = field(repr=False)
    calls: Sequence[HostCall] = field(repr=False)
    longest_call: float
    steps: Sequence[RecordedStep]
    marked_by: str
    latency: float
    skipped: int

    @property
    def title(self) -> str:
        """Rank, and number of ranks if known."""
        return f"rank {self.rank}" + ("" if self.world is None else f" of {self.world:,}")


class _Events(NamedTuple):
    """Events of a file by kind."""

    work: list[tuple[object, DeviceWork]]
    launches: dict[int | str | None, float]
    calls: list[HostCall]
    marks: list[RecordedStep]
    updates: list[float]
    skipped: int


def recorded_ranks(path: Path, profile: Mapping[str, Any]) -> list[RecordedRank]:
    """Return the GPUs in the trace `profile`, read from `path`; most files have one.

    Raises:
        MistakeError: there is no work of a GPU in it, nothing marks its steps, or all are empty.
    """
    found = _sorted_out(profile["traceEvents"])
    if not found.work:
        raise MistakeError(f"{path}: no kernels of a GPU: {RECORD}, with ProfilerActivity.CUDA")
    spread = _table(profile.get("distributedInfo"))
    devices: dict[object, list[DeviceWork]] = {}
    for device, each in found.work:
        devices.setdefault(device, []).append(each)
    names = {
        each.get("id"): str(each.get("name", ""))
        for each in _tables(profile.get("deviceProperties"))
    }
    first = _whole(spread.get("rank"))
    return [
        _rank(
            path,
            found,
            sorted(work),
            rank=first if len(devices) == 1 else first + index,
            world=_whole(spread.get("world_size")) or None,
            gpu=names.get(device, next(iter(names.values()), "")),
        )
        for index, (device, work) in enumerate(
            sorted(devices.items(), key=lambda each: str(each[0]))
        )
    ]


def _rank(
    path: Path, found: _Events, work: list[DeviceWork], *, rank: int, world: int | None, gpu: str
) -> RecordedRank:
    marks, marked_by = _marks(path, found)
    steps = list(_windows(marks, work, found.launches))
    if not steps:
        raise MistakeError(f"{path}: all marked steps are empty; record steps that train")
    return RecordedRank(
        path=path,
        rank=rank,
        world=world,
        gpu=gpu,
        work=work,
        launches=found.launches,
        calls=sorted(found.calls),
        longest_call=max((each.end - each.start for each in found.calls), default=0.0),
        steps=steps[1:] or steps,
        marked_by=marked_by,
        latency=_ordinary_latency(work, found.launches),
        skipped=found.skipped,
    )


def _sorted_out(events: Iterable[object]) -> _Events:
    """Return the events that an explanation needs, by kind."""
    found = _Events([], {}, [], [], [], 0)
    skipped = 0
    for given in events:
        event = _table(given)
        if event.get("ph") != "X":
            continue
        start, took = _number(event.get("ts")), _number(event.get("dur"))
        if start is None or took is None or took < 0:
            skipped += 1
            continue
        kind, name = str(event.get("cat")).lower(), str(event.get("name"))
        if kind in DEVICE:
            work = _work(kind, name, (start, start + took), event)
            device = _table(event.get("args")).get("device", event.get("pid"))
            found.work.append((device, work))
        else:
            number = _table(event.get("args")).get("correlation")
            _note(found, (kind, name), (start, start + took), _key(number))
    return found._replace(skipped=skipped)


def _note(
    found: _Events, what: tuple[str, str], when: tuple[float, float], number: int | str | None
) -> None:
    """Keep an event of the host if it is a launch, a slow call or a mark.

    `what` is its category and name, `number` its correlation.
    """
    (kind, name), (start, end) = what, when
    if kind in RUNTIME:
        if number is not None:
            found.launches.setdefault(number, start)
        if WAITING.match(name):
            found.calls.append(HostCall(start, end, WAIT))
        elif ALLOCATING.match(name):
            found.calls.append(HostCall(start, end, ALLOCATE))
    elif name.startswith("ProfilerStep") and kind != "gpu_user_annotation":
        found.marks.append(RecordedStep(start, end, name))
    elif LOADING.search(name):
        found.calls.append(HostCall(start, end, LOAD))
    elif name.startswith("Optimizer.step#") and kind in ("user_annotation", "cpu_op", "operator"):
        found.updates.append(end)


def _work(kind: str, name: str, when: tuple[float, float], event: Mapping[str, Any]) -> DeviceWork:
    """Return a piece of work of the GPU."""
    args = _table(event.get("args"))
    collective: TracedCollective | None = None
    if "memcpy" in kind:
        direction = {"htod": "copy to GPU", "dtoh": "copy to host"}
        what = next((text for key, text in direction.items() if key in name.lower()), ON_GPU)
    elif "memset" in kind:
        what = "fill"
    elif (told := args.get("Collective name")) is not None or is_network(name):
        what = "communication"
        stream = args.get("stream", str(event.get("tid")).removeprefix("stream "))
        collective = TracedCollective(collective_kind(f"{told or ''} {name}"), _group(args, stream))
    else:
        what = kernel_class(name)
    pairing = (
        str(args.get("Process Group Ranks")),
        str(args.get("In msg nelems")),
        str(args.get("dtype")),
    )
    return DeviceWork(*when, name, what, _key(args.get("correlation")), collective, pairing)


def _group(args: Mapping[str, Any], stream: object) -> str:
    """Return the description of a group, else its number, else its stream."""
    told = args.get("Process Group Description")
    if told not in (None, "", "undefined"):
        return str(told)
    number = args.get("Process Group Name")
    return f"stream {stream}" if number in (None, "") else f"group {number}"


def _marks(path: Path, found: _Events) -> tuple[list[RecordedStep], str]:
    """Return the steps as the host marks them, and what marks them.

    Raises:
        MistakeError: nothing does.
    """
    if found.marks:
        return sorted(found.marks), "ProfilerStep"
    ends = sorted(found.updates)
    if len(ends) > 1:
        steps = [
            RecordedStep(*pair, f"step {number}") for number, pair in enumerate(pairwise(ends), 1)
        ]
        return steps, "ends of Optimizer.step"
    raise MistakeError(
        f"{path}: no marks of steps: call step() of the profiler after each step, so that "
        "ProfilerStep events are recorded"
    )


def _windows(
    marks: Sequence[RecordedStep],
    work: Sequence[DeviceWork],
    launches: Mapping[int | str | None, float],
) -> Iterable[RecordedStep]:
    """Yield the steps of the GPU: each starts at the end of the work that was launched before it.

    The host runs ahead of the GPU, so its own marks are too early. Steps leave no gaps.
    """
    ordered = sorted((launches.get(each.correlation, each.start), each.end) for each in work)
    launched = [start for start, _ in ordered]
    done = list(accumulate((end for _, end in ordered), max))
    ats = [mark.start for mark in marks] + [marks[-1].end]
    cuts = [
        max(at, done[before - 1]) if (before := bisect_left(launched, at)) else at for at in ats
    ]
    for mark, (start, end) in zip(marks, pairwise(cuts), strict=True):
        if end > start:
            yield RecordedStep(start, end, mark.name)


def _ordinary_latency(
    work: Sequence[DeviceWork], launches: Mapping[int | str | None, float]
) -> float:
    """Return the longest ordinary time from a launch to the start on an idle GPU."""
    delays: list[float] = []
    busy_until = -math.inf
    for each in work:
        launch = launches.get(each.correlation)
        if launch is not None and launch > busy_until:
            delays.append(each.start - launch)
        busy_until = max(busy_until, each.end)
    return max(LATENCY_US, TIMES_MEDIAN * median(delays)) if delays else LATENCY_US


def _key(value: object) -> int | str | None:
    """Return a number of correlation; broken files have tables there."""
    return value if isinstance(value, int | str) else None


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _tables(value: object) -> list[dict[str, Any]]:
    return [_table(each) for each in cast("list[object]", value)] if isinstance(value, list) else []


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _number(value: object) -> float | None:
    """Return a finite number; old files write times as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
