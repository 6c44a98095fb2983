"""Files that a command writes: whole or not at all, and after its answer."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE

from zsim.mistake import MistakeError, UnwrittenError

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
    if not path.parent.is_dir():
        raise MistakeError(f"{option}: {path}: {path.parent} is no folder")
    if path.is_dir():
        raise MistakeError(f"{option}: {path}: is a folder, must be a file")


def write(path: Path, content: str | bytes) -> None:
    """Put `content` in the file at `path`, whole or not at all.

    A regular file is written beside its name and renamed, so that a full disk or a killed process
    leaves what was there before. Pipes, devices and symbolic links are written through: they stay
    what they are.

    Raises:
        UnwrittenError: it cannot be written.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        stream = _stream_at(path)
        if stream is not None:
            _write_stream(stream, data)
        elif path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
        else:
            _replace(path, data)
    except OSError as error:
        raise unwritten(path, (error.strerror or str(error)).lower()) from None


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
    descriptor, beside = tempfile.mkstemp(prefix=".zsim-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _mode_for(path))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise


def _mode_for(path: Path) -> int:
    """Return the permissions of the file at `path`, or those that a new file gets."""
    with suppress(FileNotFoundError):
        return S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
