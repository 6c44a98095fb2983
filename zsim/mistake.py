"""Mistakes of the caller, in one line each: the field, its value, what is allowed."""

from collections.abc import Generator
from contextlib import contextmanager
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
    return MistakeError(f"{path}: {(error.strerror or str(error)).lower()}")
