"""Traces that a command writes and reads, in the format of PyTorch's profiler."""

from importlib import import_module
from pathlib import Path

from zsim.backend.backend import Job
from zsim.backend.document import DocumentError, decode_trace, encode_trace
from zsim.files.input_file import read_file
from zsim.files.output_file import is_folder, need_folder, write
from zsim.files.source import chakra_is_there
from zsim.mistake import MistakeError, file_fault, mistakes
from zsim.trace.kineto import kineto
from zsim.trace.trace import Trace


def takes_many(option: str, where: str) -> bool:
    """Return True if traces go into a folder `where`: it exists, or the name ends with a slash.

    Raises:
        MistakeError: no file can have such a name.
    """
    return where.endswith("/") or is_folder(option, Path(where))


def need_trace(option: str, where: str) -> None:
    """Raise MistakeError unless a trace can be written to `where`, given with `option`.

    `where` is a file or a folder; a folder is created.

    Raises:
        MistakeError: it cannot be written.
    """
    path = Path(where)
    if not takes_many(option, where):
        need_folder(option, path)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_fault(f"{option}: {where}", error) from None


def need_chakra(option: str, folder: str) -> None:
    """Raise MistakeError unless Chakra traces can be written to `folder`, which is created.

    Raises:
        MistakeError: they cannot be written, or protobuf is not installed.
    """
    with chakra_is_there(option):
        import_module("google.protobuf")
    need_trace(option, folder.rstrip("/") + "/")


def write_trace(where: str, job: Job, trace: Trace) -> None:
    """Write `trace` to the file `where`, with the timeline of its first rank.

    In a folder, write a separate file for every rank of the trace, as PyTorch's profiler does.

    Raises:
        UnwrittenError: it cannot be written.
    """
    path = Path(where)
    if takes_many("trace", where):
        for rank in trace.ranks:
            text = encode_trace(trace, kineto(job.schedule, trace, rank))
            write(path / f"rank{rank.rank}.json", text)
    else:
        write(path, encode_trace(trace, kineto(job.schedule, trace, trace.ranks[0])))


def read_trace(path: Path) -> Trace:
    """Return the trace in the file at `path`, which `write_trace` wrote.

    Raises:
        MistakeError: the file does not exist, or is not a trace.
    """
    try:
        text = read_file(path)
    except UnicodeDecodeError:
        raise MistakeError(f"--against: {path}: not text: traces are JSON") from None
    except OSError as error:
        raise file_fault(f"--against: {path}", error) from None
    except ValueError:  # a null character in the name
        raise MistakeError(f"--against: {str(path)!r} must be the name of a file") from None
    with mistakes(DocumentError, prefix=f"--against: {path}: "):
        return decode_trace(text)
