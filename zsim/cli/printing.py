"""Output of a command: its answer first, then the files that were asked for."""

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
"""Makes one of the files that were asked for beside the answer, and writes it."""


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
    """Return what writes the files whose paths are given."""
    return [partial(write, path) for path, write in asked if path is not None]


@contextmanager
def interruption_told() -> Generator[None]:
    """Say on standard error what an interrupted command has kept, if it has kept something."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        if str(stopped):
            print(one_line(str(stopped)), file=sys.stderr)
        raise


@contextmanager
def answer_before(outputs: list[Output]) -> Generator[None]:
    """Print the answer in the body; write `outputs` after it, also if its reader has gone.

    Raises:
        UnwrittenError: the answer stands, and some of the files could not be written.
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
        except Exception as error:  # those after it are written all the same
            fault = fault or error
    if fault is not None:
        raise fault
    if failures:
        raise UnwrittenError("; ".join(failures))
    if gone is not None:
        raise gone
