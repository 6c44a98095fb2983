"""The documentation says what happens: its commands are run in order, their outputs compared."""

import json
import re
from inspect import signature
from pathlib import Path

import pytest
from page_commands import File, follow, steps

import zsim_scenarios
from zsim.backend.backend import Backend
from zsim.cli.main import answer
from zsim.scenario.toml import parse

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted((DOCS / "how_to").glob("*.md")), DOCS / "tutorial.md"]
COMMAND_LINE = sorted((DOCS / "reference").glob("command_line*.md"))
PAPER = DOCS / "zero_paper.md"
EXAMPLE = DOCS / "reference" / "scenario_example.md"
SHORT = [DOCS / "reference" / "names.md", EXAMPLE, PAPER]
"""Pages whose commands take little time."""

VARYING = {"predict", "release", "serve", "train"}
"""Pages without commands to run: output of real ranks varies, a release writes a tag, and a server
answers until it is ended."""

PAPER_TFLOPS = 38.7
"""Rajbhandari et al. 2020 (arXiv 1910.02054v3), figure 2, 100B."""


def blocks(page: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of a page in `language`."""
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("page", [*PAGES, *COMMAND_LINE], ids=lambda page: str(page.stem))
def test_the_commands_of_a_page_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python tests/support/page_commands.py PAGE` writes what they print now."""
    monkeypatch.setenv("COLUMNS", "100")
    found = list(follow(page.read_text("utf-8"), tmp_path))
    assert found or page.stem in VARYING
    for command, prints in found:
        assert prints == command.prints, command.words


@pytest.mark.parametrize("page", SHORT, ids=lambda page: str(page.stem))
def test_the_commands_of_a_short_page_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    found = list(follow(page.read_text("utf-8"), tmp_path))
    assert found
    for command, prints in found:
        assert prints == command.prints, command.words


def test_the_scenario_shown_is_the_one_that_ships() -> None:
    texts = blocks("reference/scenario_example.md", "toml")
    shown = [parse(each) for each in texts if each.startswith("title")]
    assert shown == [parse(zsim_scenarios.text("zero_100b"))]


def test_the_schedule_shown_is_the_example_that_runs() -> None:
    page = (DOCS / "how_to" / "prove.md").read_text("utf-8")
    shown = {each.name: each.text for each in steps(page) if isinstance(each, File)}
    example = ROOT / "examples" / "deadlock_by_hand.py"
    assert shown[example.name] == example.read_text("utf-8")


def test_the_backend_shown_has_the_methods_of_the_protocol() -> None:
    (shown,) = [each for each in blocks("plug_points.md", "python") if "class MyBackend" in each]
    for method in (Backend.refusal, Backend.run):
        plain = re.sub(r"(?:\w+\.)+(?=[A-Z])", "", str(signature(method)))
        assert f"def {method.__name__}{plain}:" in shown


def test_the_distance_to_the_paper_is_what_the_simulation_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["run", "zero_100b", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    page = PAPER.read_text("utf-8")
    rows = re.findall(r"^\| zsim, .* \| ([\d.]+) \| ([+-]\d+) % \|$", page, re.MULTILINE)
    found = [run["model_tflops_per_gpu"], run["hardware_tflops_per_gpu"]]
    assert rows == [(f"{each:.1f}", f"{100 * (each / PAPER_TFLOPS - 1):+.0f}") for each in found]


def test_every_command_has_its_help_in_the_reference() -> None:
    text = "".join(each.read_text("utf-8") for each in COMMAND_LINE)
    listed = re.findall(r"^  ([a-z]+) {2,}", text.split("Commands:")[1].split("```")[0], re.M)
    assert len(listed) > 8
    assert re.findall(r"^## zsim (\w+)$", text, re.M) == listed


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert there == named
