"""Files that a command is given: regular files of a bounded size, read completely."""

import errno
import os
import stat
from pathlib import Path

from zsim.limits import limits
from zsim.units import format_bytes

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_config(path: str | Path) -> str:
    """Return the text of a scenario, a study or the description of a cluster.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than the limits allow.
        ValueError: it is not UTF-8, or cannot be the name of a file.
    """
    return _text(path, limits().config_bytes)


def read_file(path: str | Path) -> str:
    """Return the text of a schedule, a trace or a table.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than the limits allow.
        ValueError: it is not UTF-8, or cannot be the name of a file.
    """
    return _text(path, limits().file_bytes)


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a binary trace.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than the limits allow.
    """
    return _bytes(path, limits().file_bytes)


def is_there(path: Path) -> bool:
    """Return True if there is a file at `path`; names that are too long or have nulls have none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _text(path: str | Path, most_bytes: int) -> str:
    """Return the text with line ends converted to newlines."""
    text = _bytes(path, most_bytes).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _bytes(path: str | Path, most_bytes: int) -> bytes:
    # Without O_NONBLOCK, opening a pipe waits for a writer, before its kind can be checked.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", closefd=True) as file:
        status = os.fstat(descriptor)
        kind = stat.S_IFMT(status.st_mode)
        if kind in KINDS:
            raise OSError(errno.EINVAL, f"is {KINDS[kind]}, must be a regular file", str(path))
        content = file.read(most_bytes + 1) if status.st_size <= most_bytes else b""
        size = max(status.st_size, len(content))  # files of /proc report a size of 0
        if size > most_bytes:
            why = f"has {format_bytes(size)}, must have at most {format_bytes(most_bytes)}"
            raise OSError(errno.EFBIG, why, str(path))
        return content
