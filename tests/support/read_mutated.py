"""Runs commands on broken files, one after the other, in a process that is not let grow.

    python read_mutated.py FIRST COUNT

A line on standard output for each case: its number, the words, and "right" or what happened. A case
that computes for too long ends the process with a stack.
"""

import faulthandler
import io
import resource
import signal
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Final

from memory_peak import peak_bytes
from mutated_files import Case, case

from zsim.cli.main import answer

LARGEST_BYTES: Final = 2**30
LINE_LETTERS_MAX: Final = 1010
PATIENCE_S: Final = 60.0
"""Seconds of computing, whatever else the machine does."""

RIGHT: Final = "right"


def fault(found: Case, folder: Path) -> str | None:
    """What is wrong with the answer to `found`, or None."""
    words = found.write(folder)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = answer(words)
    lines = err.getvalue().splitlines()
    if code not in (0, 1, 2):
        return f"exit {code}: {err.getvalue()}"
    if any(not line.startswith("zsim: ") for line in lines):
        return f"no line of ours: {err.getvalue()}"
    if code == 2 and (len(lines) not in (1, 2) or out.getvalue()):
        return f"exit 2 is one line, not {lines} after {out.getvalue()!r}"
    if code == 2 and len(lines) == 2 and "not modelled" not in lines[0]:
        return f"two lines: {lines}"
    if code != 2 and not out.getvalue():
        return f"exit {code} without an answer"
    longest = max(map(len, lines), default=0)
    return f"a line of {longest} letters" if longest > LINE_LETTERS_MAX else None


def main(first: int, count: int) -> None:
    """Read cases `first` and on."""
    case(0)
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
    limit = LARGEST_BYTES + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    faulthandler.register(signal.SIGPROF, chain=True)  # a stack, then the end of the process
    for number in range(first, first + count):
        signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
        with tempfile.TemporaryDirectory() as folder:
            found = case(number)
            say(f"{number}: {' '.join(found.words)}: ")
            wrong = fault(found, Path(folder))
        say(f"{wrong or RIGHT}\n")
    signal.setitimer(signal.ITIMER_PROF, 0)
    peak = peak_bytes()
    if peak > LARGEST_BYTES:
        say(f"the largest of them took {peak} bytes\n")


def say(text: str) -> None:
    """Write at once, so that what killed this process stands last."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
