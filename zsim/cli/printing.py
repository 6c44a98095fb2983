"""Output of a command: its answer first, then the requested files."""

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.mistake import UnwrittenError, one_line

if TYPE_CHECKING:
    from zsim.api.answer import Answer

Output = Callable[[], object]
"""Function that writes one of the requested files."""


def print_answer(answer: "Answer", *, as_json: bool) -> None:
    """Print `answer` as text, or as one JSON object."""
    if as_json:
        print_json(answer.to_dict())
    else:
        print(answer.text())


def print_json(found: object) -> None:
    """Print `found` as one JSON object."""
    print(json.dumps(found, indent=2, allow_nan=False))


def outputs(*asked: tuple[Path | str | None, Callable[[Path | str], object]]) -> list[Output]:
    """Return a writer for each (path, write) pair whose path is given."""
    return [partial(write, path) for path, write in asked if path is not None]


@contextmanager
def noted_interrupt() -> Generator[None]:
    """On interruption, print on standard error which results the command has kept, if any."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        if str(stopped):
            print(one_line(str(stopped)), file=sys.stderr)
        raise


@contextmanager
def answer_before(outputs: list[Output]) -> Generator[None]:
    """Run the `with` block, which prints the answer, then write `outputs`.

    All outputs are written even if one fails or if the reader of the answer has closed the pipe.

    Raises:
        UnwrittenError: the answer is printed, but some files could not be written.
    """
    gone: OSError | None = None
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        gone = error
    failures: list[str] = []
    fault: Exception | None = None
    for output in outputs:
        try:
            output()
        except UnwrittenError as failure:
            failures.append(str(failure))
        except Exception as error:  # continue with the other outputs
            fault = fault or error
    if fault is not None:
        raise fault
    if failures:
        raise UnwrittenError("; ".join(failures))
    if gone is not None:
        raise gone
