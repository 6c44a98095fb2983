"""Time that a stream waited for a busy host: an upper bound on the gain of a faster host."""

from collections.abc import Sequence
from itertools import islice

from zsim.schedule.issue_order import SETUP
from zsim.schedule.operation import Compute, walk
from zsim.schedule.schedule import Program
from zsim_des.engine.stream import ProgramRun


def host_bound_ps(program: Program, instances: Sequence[ProgramRun], steps: int) -> tuple[int, ...]:
    """Return by step how long the Compute stream waited while the host was issuing.

    Picoseconds. Empty if issuing takes no time.
    """
    busy = [span for each in instances for span in each.issuing if span[0] < span[1]]
    stream = _computes_on(program)
    if not busy or stream is None:
        return ()
    found = [0] * steps
    first = 0
    for instance in instances:
        for begin_ps, end_ps in instance.late.get(stream, ()) if instance.step != SETUP else ():
            while first < len(busy) and busy[first][1] <= begin_ps:  # both are in ascending order
                first += 1
            for start_ps, stop_ps in islice(busy, first, None):
                if start_ps >= end_ps:
                    break
                found[instance.step] += min(stop_ps, end_ps) - max(start_ps, begin_ps)
    return tuple(found)


def host_bound_in_ps(program: Program, run: ProgramRun, window: tuple[int, int]) -> int:
    """Return the time in `window` in which the compute stream waits for a host that issues."""
    busy = [span for span in run.issuing if span[0] < span[1]]
    late = run.late.get(_computes_on(program) or "", ())
    clipped = [(max(begin, window[0]), min(end, window[1])) for begin, end in late]
    return sum(
        max(0, min(stop_ps, end_ps) - max(start_ps, begin_ps))
        for begin_ps, end_ps in clipped
        if begin_ps < end_ps
        for start_ps, stop_ps in busy
    )


def _computes_on(program: Program) -> str | None:
    """Return the stream of the first Compute of a step."""
    found = (each.stream for each in walk(program.step) if isinstance(each, Compute))
    return next(found, None)
