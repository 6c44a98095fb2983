"""Draw the pictures of docs/runtimes.md and docs/runtimes/ again, and compute the table again.

After an intended change, run the commands below the pictures.
"""

import json
import re
from pathlib import Path

import pytest

from zsim.cli.main import answer
from zsim.runtimes.lookup import runtimes
from zsim.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = {
    path: path.read_text("utf-8")
    for path in (DOCS / "runtimes.md", *sorted((DOCS / "runtimes").glob("*.md")))
}
TEXT = "".join(PAGES.values())

PICTURES = {
    path: words.split()
    for words, path in re.findall(r"^zsim (run .+) --timeline (docs/.+\.svg)$", TEXT, re.MULTILINE)
}
"""Each picture's path, and the command that draws it."""

ROWS = re.findall(r"^\| (.+) \| `(--set .+)` \| (.+) \| (.+) \| (.+) \|$", TEXT, flags=re.MULTILINE)
"""The table of figures: order, settings, step time, peak, exposed communication."""


def test_every_runtime_is_shown() -> None:
    for runtime in runtimes():
        assert any(f"zero.emulate={runtime}" in words for words in PICTURES.values())
        assert any(f"zero.emulate={runtime}" in settings.split() for _, settings, *_ in ROWS)


def test_every_picture_has_its_command() -> None:
    shown = {
        str((page.parent / path).relative_to(ROOT))
        for page, text in PAGES.items()
        for path in re.findall(r"!\[.+\]\((.+)\)", text)
    }
    there = {str(path.relative_to(ROOT)) for path in (DOCS / "runtimes").glob("*.svg")}
    assert shown == set(PICTURES) == there


@pytest.mark.matrix(12)
@pytest.mark.parametrize("path", PICTURES)
def test_a_picture_is_what_its_command_draws(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "again.svg"
    assert answer([*PICTURES[path], "--timeline", str(drawn)]) == 0
    assert capsys.readouterr().err == ""
    assert drawn.read_text("utf-8") == (ROOT / path).read_text("utf-8")


@pytest.mark.one_commit_in(24)
def test_the_table_has_what_its_commands_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Percentages are against the last row above that is zsim's own."""
    written, found = [], []
    own = (0.0, 0.0)
    for order, settings, *cells in ROWS:
        assert answer(["run", "llama2_7b", *settings.split(), "--json"]) == 0
        run = json.loads(capsys.readouterr().out)
        step_s, peak_bytes = run["step_time_s"], run["peak_allocated_bytes"]
        own = (step_s, peak_bytes) if order.startswith("zsim") else own
        against = [
            "" if order.startswith("zsim") else f" ({100 * (one / other - 1):+.0f} %)"
            for one, other in zip((step_s, peak_bytes), own, strict=True)
        ]
        figures = [
            format_seconds(step_s) + against[0],
            format_bytes(peak_bytes) + against[1],
            format_seconds(run["exposed_communication_s"]),
        ]
        written.append((settings, cells))
        found.append((settings, figures))
    assert len(found) >= 12
    assert found == written


def test_every_link_leads_somewhere() -> None:
    links = [
        (page, target)
        for page, text in PAGES.items()
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    ]
    assert links
    assert [target for page, target in links if not (page.parent / target).exists()] == []
