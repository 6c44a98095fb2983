"""Output of a command: its answer first, then the files that were asked for."""

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.mistake import UnwrittenError

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
    for output in outputs:
        try:
            output()
        except UnwrittenError as failure:
            failures.append(str(failure))
    if failures:
        raise UnwrittenError("; ".join(failures))
    if gone is not None:
        raise gone
