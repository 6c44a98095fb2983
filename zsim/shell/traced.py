"""Traces that a command writes, in the form of PyTorch's profiler."""

from pathlib import Path

from zsim.backend import Job
from zsim.document import encode_trace
from zsim.kineto import kineto
from zsim.shell.written import write
from zsim.trace import Trace


def write_trace(path: Path, job: Job, trace: Trace) -> None:
    """Put `trace` in the file at `path`, with the timeline of its first rank.

    In a folder every rank of the trace has a file of its own, as PyTorch's profiler writes them.

    Raises:
        MistakeError: it cannot be written.
    """
    if path.is_dir():
        for rank in trace.ranks:
            text = encode_trace(trace, kineto(job.schedule, trace, rank))
            write(path / f"rank{rank.rank}.json", text)
    else:
        write(path, encode_trace(trace, kineto(job.schedule, trace, trace.ranks[0])))
