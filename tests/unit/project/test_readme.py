"""The README says what happens: its commands are run, its outputs compared, its links followed."""

import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from shown import Command, steps

import zsim_scenarios
from zsim.backend.backend import Backend
from zsim.cli.main import answer
from zsim.scenario.toml import parse

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text("utf-8")
PAPER_TFLOPS = 38.7
"""Rajbhandari et al. 2020 (arXiv 1910.02054v3), figure 2, 100B."""


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def behind(command: str) -> str:
    """What `make run` runs, by the Makefile; any other command is itself."""
    if command != "make run":
        return command
    recipe = re.search(
        r"^run:.*\n\t@?\.venv-run/bin/(.+)$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    assert recipe is not None
    return recipe.group(1)


COMMANDS = {each.words: each.prints for each in steps(README) if isinstance(each, Command)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_the_readme_shows(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = behind(command).split()
    if program == "zsim":
        answer(words)
        captured = capsys.readouterr()
        output = captured.out + captured.err
    else:
        assert program == "python"
        output = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    assert "\n".join(line.rstrip() for line in output.splitlines()) == COMMANDS[command]


def test_the_two_commands_are_shown() -> None:
    assert "make run" in COMMANDS
    assert any(block.startswith("$ make test\n") for block in blocks("text"))


def test_the_scenario_shown_is_the_one_that_ships() -> None:
    (shown,) = blocks("toml")
    assert parse(shown) == parse(zsim_scenarios.text("zero_100b"))


def test_the_example_shown_is_the_one_that_runs() -> None:
    example = (ROOT / "examples" / "deadlock_by_hand.py").read_text("utf-8")
    assert example in blocks("python")


def test_the_backend_shown_has_the_methods_of_the_protocol() -> None:
    (shown,) = [block for block in blocks("python") if block.startswith("class MyBackend")]
    for method in (Backend.refusal, Backend.run):
        plain = re.sub(r"(?:\w+\.)+(?=[A-Z])", "", str(signature(method)))
        assert f"def {method.__name__}{plain}:" in shown


def test_the_distance_to_the_paper_is_what_the_simulation_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["run", "zero_100b", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    rows = re.findall(r"^\| zsim, .* \| ([\d.]+) \| ([+-]\d+) % \|$", README, re.MULTILINE)
    found = [run["model_tflops_per_gpu"], run["hardware_tflops_per_gpu"]]
    assert rows == [(f"{each:.1f}", f"{100 * (each / PAPER_TFLOPS - 1):+.0f}") for each in found]


def test_the_table_of_evidence_is_what_trust_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["validate", "trust", "--json"]) == 0
    found = {
        each["quantity"]: each
        for each in json.loads(capsys.readouterr().out)["coverage"]
        if each["left_out"] == "sweep"
    }
    rows = re.findall(
        r"^\| (step time|peak memory) \| (\d+) \| (\d+) % \| ([\d.]+) % \|$", README, re.MULTILINE
    )
    assert len(rows) == len(found)
    for quantity, judged, stated, covered in rows:
        everything = found[quantity]["all"]
        assert int(judged) == everything["rows"]
        assert f"{everything['stated'] / everything['rows']:.0%}" == f"{stated}%"
        assert f"{everything['covered'] / everything['stated']:.1%}" == f"{covered}%"
    assert "5 % of the step time for FSDP1" in README
    (fsdp1,) = (
        each["median_stated_error"]
        for each in found["step time"]["kinds"]
        if each["kind"] == "FSDP1, parameters sharded, bf16, a100, one node"
    )
    assert f"{fsdp1:.0%}" == "5%"


def test_every_link_leads_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    local = [target for target in targets if not target.startswith("https://")]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []
