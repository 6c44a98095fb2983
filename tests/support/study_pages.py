"""Pages of docs/studies: what stands under the command of each, its picture, and both again.

    python tests/support/study_pages.py [NAME ...]

The conclusion above it is written by hand, from that alone.
"""

import io
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import zsim_scenarios
from zsim.cli.main import answer

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "studies"
OVERVIEW = {"nics": DOCS / "studies.md"}
"""Other pages that show an answer."""


def shown(page: Path, name: str) -> str:
    """What stands in `page` under the command that sweeps study `name`."""
    return _parts(page, name)[1].rstrip()


def answered(name: str) -> tuple[str, str]:
    """What `zsim sweep` prints of a study and draws, in a folder where nothing is kept."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, _inside(folder), redirect_stdout(printed):
        assert answer(["sweep", name, "--picture", f"{name}.svg"]) == 0
        picture = Path(f"{name}.svg").read_text("utf-8")
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()).rstrip(), picture


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    text = page.read_text("utf-8")
    command = f"$ zsim sweep {name}\n" if page.parent == DOCS else _drawn(name)
    before, command, rest = text.partition(command)
    inside, fence, after = rest.partition("```")
    return before + command, inside, fence + after


def _drawn(name: str) -> str:
    """The command of a study's own page."""
    return f"$ zsim sweep {name} --picture {name}.svg\n"


@contextmanager
def _inside(folder: str) -> Generator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main(names: Sequence[str]) -> None:
    """Write the answers of these studies, or of all, into their pages."""
    for name in names or zsim_scenarios.study_names():
        found, picture = answered(name)
        (PAGES / f"{name}.svg").write_text(picture, "utf-8")
        for page in (PAGES / f"{name}.md", *([OVERVIEW[name]] if name in OVERVIEW else [])):
            before, _, after = _parts(page, name)
            page.write_text(f"{before}{found}\n{after}", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
