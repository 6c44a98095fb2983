"""Losses of a run that goes on, in a file: no end of the run takes those of its finished steps."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

HEADER = "step,rank,loss\n"


def begin() -> Path:
    """Return a new file in the folder of temporary files, to which ranks add lines.

    Raises:
        OSError: there is no space for one.
    """
    descriptor, name = tempfile.mkstemp(prefix="zsim-losses-", suffix=".csv")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(HEADER)
    return Path(name)


def add(journal: Path, *, step: int, rank: int, loss: float) -> None:
    """Add the loss of one step; ranks share the file, so a line is one write at its end.

    A full disk does not end the run: the losses are in its result all the same.
    """
    with suppress(OSError):
        descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{step},{rank},{loss!r}\n".encode())
        finally:
            os.close(descriptor)


def kept(journal: Path) -> str:
    """Return where the losses of a run are that did not end well; remove a file that has none."""
    with suppress(OSError):
        lines = journal.read_text("utf-8").splitlines()[1:]
        steps = len({line.partition(",")[0] for line in lines})
        if steps:
            return f"losses of {steps} step{'s' if steps > 1 else ''} are in {journal}"
        journal.unlink()
    return ""
