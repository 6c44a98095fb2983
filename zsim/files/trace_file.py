"""Traces that a command writes, in the form of PyTorch's profiler, and reads again."""

from importlib import import_module
from pathlib import Path

from zsim.backend.backend import Job
from zsim.backend.document import DocumentError, decode_trace, encode_trace
from zsim.files.given import read_file
from zsim.files.source import chakra_is_there
from zsim.files.written import is_folder, need_folder, write
from zsim.mistake import MistakeError, file_fault, mistakes
from zsim.trace.kineto import kineto
from zsim.trace.trace import Trace


def takes_many(option: str, where: str) -> bool:
    """Tell whether traces go into a folder `where`: there is one, or the name ends as one.

    Raises:
        MistakeError: no file can have such a name.
    """
    return where.endswith("/") or is_folder(option, Path(where))


def need_trace(option: str, where: str) -> None:
    """Check that a trace can be put at `where`, given with `option`: a file, or a folder.

    A folder is made.

    Raises:
        MistakeError: it cannot.
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
    """Check that Chakra traces can be put in `folder`, given with `option`; it is made.

    Raises:
        MistakeError: they cannot, or protobuf is not installed.
    """
    with chakra_is_there(option):
        import_module("google.protobuf")
    need_trace(option, folder.rstrip("/") + "/")


def write_trace(where: str, job: Job, trace: Trace) -> None:
    """Put `trace` in the file `where`, with the timeline of its first rank.

    In a folder every rank of the trace has a file of its own, as PyTorch's profiler writes them.

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
        MistakeError: there is none.
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
