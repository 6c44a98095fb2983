"""Mistakes of the caller, in one line each: the field, its value, what is allowed."""

from collections.abc import Generator
from contextlib import contextmanager
from errno import ENOMEM
from typing import Final

LETTERS_MAX: Final = 1000
"""Longer lines lose their middle: a value in a file may be of any size."""


class MistakeError(ValueError):
    """Mistake of the caller. The message is printed as it is, on one line. Exit code 2."""


class UnwrittenError(Exception):
    """Files could not be written; the message names each and says why. Exit code 4."""


def one_line(message: str) -> str:
    """Return `message` as a line on standard error, whatever it holds."""
    line = "".join(letter if letter.isprintable() else " " for letter in message)
    line = f"zsim: {' '.join(line.split())}"
    half = LETTERS_MAX // 2
    return line if len(line) <= LETTERS_MAX else f"{line[:half]} ... {line[-half:]}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error`, or an error behind it, says that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == ENOMEM:
            return True
        # The dynamic loader, which gives no error number.
        if isinstance(error, ImportError) and "failed to map segment" in str(error):
            return True
        # CPython 3.11 where the exception itself found no memory.
        if isinstance(error, SystemError) and "without exception set" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def mistakes(*kinds: type[Exception], prefix: str = "") -> Generator[None]:
    """Errors of `kinds` raised inside are the caller's, named with `prefix`.

    Raises:
        MistakeError: instead of them.
    """
    try:
        yield
    except kinds as error:
        raise MistakeError(f"{prefix}{error}") from error


def file_fault(path: str, error: OSError) -> MistakeError:
    """Return the mistake of naming a file that cannot be read or written."""
    return MistakeError(f"{path}: {reason_of(error)}")


def reason_of(error: OSError) -> str:
    """Return why the system refused, in the middle of a line."""
    why = error.strerror or str(error)
    return f"{why[:1].lower()}{why[1:]}"
