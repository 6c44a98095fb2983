"""Command lines that are asked without a process, and files to ask them about."""

from pathlib import Path

import pytest
from command_answers import SCENARIO, Ask

from zsim.cli.main import answer


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command line; exit code, standard output, standard error."""

    def asked(*words: str | Path) -> tuple[int, str, str]:
        code = answer([str(word) for word in words])
        captured = capsys.readouterr()
        return int(code), captured.out, captured.err

    return asked


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "two_layers.toml"
    path.write_text(SCENARIO, "utf-8")
    return path


@pytest.fixture
def schedule(ask: Ask, scenario: Path, tmp_path: Path) -> Path:
    path = tmp_path / "schedule.json"
    assert ask("plan", scenario, "--schedule", path)[0] == 0
    return path
