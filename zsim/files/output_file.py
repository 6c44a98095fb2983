"""Files that a command writes: completely or not at all, and after its answer."""

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
    """Return the error for a file at `path` that is not written for `reason`."""
    return UnwrittenError(f"{path} could not be written: {reason}")


def need_folder(option: str, path: Path) -> None:
    """Raise MistakeError unless the folder of the file `path` exists, and `path` is not a folder.

    Checked before anything runs; `option` gave the path.

    Raises:
        MistakeError: the folder is missing, or `path` is a folder.
    """
    if not is_folder(option, path.parent):
        raise MistakeError(f"{option}: {path}: {path.parent} is no folder")
    if is_folder(option, path):
        raise MistakeError(f"{option}: {path}: is a folder, must be a file")


def is_folder(option: str, path: Path) -> bool:
    """Return True if there is a folder at `path`, given with `option`.

    Raises:
        MistakeError: no file can have such a name.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise file_fault(f"{option}: {path}", error) from None


def write(path: Path, content: str | bytes) -> None:
    """Write `content` to the file at `path`, completely or not at all.

    A regular file is first written without a name and then replaces the old one, so that a full
    disk or a killed process leaves the old content. Linux cannot give a file a name that another
    file has, so replacing takes two steps: a process killed between them leaves the complete new
    file under a hidden name in the same folder. A symbolic link is kept, and its target replaced.
    Pipes and devices are written directly.

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
    except RuntimeError as error:  # a link that points to itself
        raise unwritten(path, str(error)) from None


def _stream_at(path: Path) -> int | None:
    """Return the standard stream at `path`, if any: opened again, it would lose the answer."""
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
                # Python follows a link here only if given a folder, which an absolute path ignores.
                number = file.fileno()
                os.link(f"/proc/self/fd/{number}", beside, src_dir_fd=number, follow_symlinks=True)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _nameless(folder: Path, beside: Path) -> int:
    """Open a new file without a name in `folder`: a process killed while writing leaves nothing.

    If the file system does not support such files, or /proc is missing, name the file `beside`.
    """
    flags, mode = os.O_WRONLY | os.O_CLOEXEC, 0o600
    if Path("/proc/self/fd").is_dir():
        with suppress(OSError):
            return os.open(folder, flags | os.O_TMPFILE, mode)
    return os.open(beside, flags | os.O_CREAT | os.O_EXCL, mode)


def _sync_folder(folder: Path) -> None:
    """Sync the new name to disk. Errors are ignored, since the file itself is already written."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mode_for(path: Path) -> int:
    """Return the permissions of the file at `path`, or of a new file."""
    with suppress(FileNotFoundError):
        return S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
