"""Files that a command writes: whole or not at all, and after its answer."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE

from zsim.mistake import MistakeError, UnwrittenError, file_fault, reason_of

STREAMS = (1, 2)
"""Standard output and standard error, which /dev/stdout and /dev/stderr may name."""


def unwritten(path: Path, reason: str) -> UnwrittenError:
    """Return the error of a file at `path` that is not written for `reason`."""
    return UnwrittenError(f"{path} could not be written: {reason}")


def need_folder(option: str, path: Path) -> None:
    """Check that the file at `path`, given with `option`, can have a folder and is none.

    Raises:
        MistakeError: it cannot: told before anything runs.
    """
    if not is_folder(option, path.parent):
        raise MistakeError(f"{option}: {path}: {path.parent} is no folder")
    if is_folder(option, path):
        raise MistakeError(f"{option}: {path}: is a folder, must be a file")


def is_folder(option: str, path: Path) -> bool:
    """Tell whether there is a folder at `path`, given with `option`.

    Raises:
        MistakeError: no file can have such a name.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise file_fault(f"{option}: {path}", error) from None


def write(path: Path, content: str | bytes) -> None:
    """Put `content` in the file at `path`, whole or not at all.

    A regular file is written without a name and then takes its place, so that a full disk or a
    killed process leaves what was there before. It takes it in two steps, since Linux gives a file
    no name that another has: a process killed between them leaves the whole new file beside, under
    a hidden name. A symbolic link stays one: its target is written so. Pipes and devices are
    written through.

    Raises:
        UnwrittenError: it cannot be written.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        stream = _stream_at(path)
        if stream is not None:
            _write_stream(stream, data)
        elif path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except OSError as error:
        raise unwritten(path, reason_of(error)) from None
    except RuntimeError as error:  # a link that leads to itself
        raise unwritten(path, str(error)) from None


def _stream_at(path: Path) -> int | None:
    """Return the standard stream that `path` leads to: opened anew, it would lose the answer."""
    for stream in STREAMS:
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(stream)):
                return stream
    return None


def _write_stream(stream: int, data: bytes) -> None:
    for printed in (sys.stdout, sys.stderr):
        if printed is not None:
            printed.flush()
    with os.fdopen(os.dup(stream), "wb") as file:
        file.write(data)


def _replace(path: Path, data: bytes) -> None:
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(13, os.strerror(13))
    beside = path.with_name(f".zsim-{token_hex(8)}")
    try:
        with os.fdopen(_nameless(path.parent, beside), "wb") as file:
            os.fchmod(file.fileno(), _mode_for(path))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if not beside.exists():
                # Python follows a link here only if told a folder, which an absolute path ignores.
                number = file.fileno()
                os.link(f"/proc/self/fd/{number}", beside, src_dir_fd=number, follow_symlinks=True)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _nameless(folder: Path, beside: Path) -> int:
    """Open a new file in `folder` that has no name: a process killed in writing leaves nothing.

    Where the file system has no such files, or /proc is missing, the file is called `beside`.
    """
    flags, mode = os.O_WRONLY | os.O_CLOEXEC, 0o600
    if Path("/proc/self/fd").is_dir():
        with suppress(OSError):
            return os.open(folder, flags | os.O_TMPFILE, mode)
    return os.open(beside, flags | os.O_CREAT | os.O_EXCL, mode)


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk as well; the file is there already, whatever comes of this."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mode_for(path: Path) -> int:
    """Return the permissions of the file at `path`, or those that a new file gets."""
    with suppress(FileNotFoundError):
        return S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
