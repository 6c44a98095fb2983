"""The documentation says what happens: its commands are run in order, their outputs compared."""

import re
from pathlib import Path

import pytest
from shown import follow

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted((DOCS / "how_to").glob("*.md")), DOCS / "tutorial.md"]
COMMAND_LINE = DOCS / "reference" / "command_line.md"


@pytest.mark.matrix(24)
@pytest.mark.parametrize("page", [*PAGES, COMMAND_LINE], ids=lambda page: str(page.stem))
def test_the_commands_of_a_page_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python tests/support/shown.py PAGE` writes what they print now."""
    monkeypatch.setenv("COLUMNS", "100")
    found = list(follow(page.read_text("utf-8"), tmp_path))
    assert found or page.stem in (
        "predict",
        "train",
    )  # what real ranks print is not always the same
    for command, prints in found:
        assert prints == command.prints, command.words


def test_every_command_has_its_help_in_the_reference() -> None:
    text = COMMAND_LINE.read_text("utf-8")
    listed = re.findall(r"^  ([a-z]+) {2,}", text.split("Commands:")[1].split("```")[0], re.M)
    assert len(listed) > 8
    assert re.findall(r"^## zsim (\w+)$", text, re.M) == listed


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert there == named
