"""Pages whose commands can be run: what a page shows is what the command prints.

A `console` block has commands, each behind `$ `, with what it prints below. A block with a title,
such as `toml title="study.toml"`, is a file that the commands after it find.
`python page_commands.py PAGE` runs the commands of a page and writes what they print into it.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

from zsim.cli.main import answer

BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class File:
    """A file that a page shows."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a page shows, and what it prints by that."""

    words: str
    prints: str


def steps(page: str) -> Iterator[File | Command]:
    """Files and commands of a page, in order."""
    for language, title, text in BLOCK.findall(page):
        if title:
            yield File(title, text)
        elif language == "console":
            lines = text.splitlines()
            for index, line in enumerate(lines):
                if line.startswith("$ "):
                    under = takewhile(lambda each: not each.startswith("$ "), lines[index + 1 :])
                    yield Command(line.removeprefix("$ "), "\n".join(under))


def printed(words: str) -> str:
    """What a command prints, in the folder where this runs: `zsim` here, `python` on its own."""
    program, *rest = shlex.split(words)
    if program == "python":
        made = subprocess.run(
            [sys.executable, *rest], capture_output=True, text=True, check=False, timeout=200
        )
        return _lines(made.stdout + made.stderr)
    assert program == "zsim", f"{words}: only zsim and python are run"
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        answer(rest)
    return _lines(out.getvalue())


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def follow(page: str, folder: Path) -> Iterator[tuple[Command, str]]:
    """Each command of `page` with what it prints, run one after the other in `folder`."""
    with chdir(folder):
        for step in steps(page):
            match step:
                case File(name, text):
                    Path(name).write_text(text, "utf-8")
                case Command(words):
                    yield step, printed(words)


def shown_again(page: str) -> str:
    """`page` with what its commands print now."""
    with TemporaryDirectory() as folder:
        for command, prints in follow(page, Path(folder)):
            old = f"$ {command.words}\n" + (f"{command.prints}\n" if command.prints else "")
            assert old in page, command.words
            page = page.replace(old, f"$ {command.words}\n" + (f"{prints}\n" if prints else ""), 1)
    return page


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        path.write_text(shown_again(path.read_text("utf-8")), "utf-8")
