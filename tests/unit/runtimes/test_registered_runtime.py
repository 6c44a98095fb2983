"""A package of somebody else adds a runtime: one folder and one entry point."""

from pathlib import Path

import pytest
from other_package import install, zsim

ENTRY = "[zsim.runtimes]\nmine = renamed_fsdp2:RUNTIME\n"
SETTINGS = ("zero.stage=3", "zero.emulate=mine", "zero.bucket_elements=500_000_000")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as an installer leaves it."""
    return install(tmp_path_factory.mktemp("site"), "renamed_fsdp2", ENTRY)


def settings(*more: str) -> list[str]:
    return [word for each in (*SETTINGS, *more) for word in ("--set", each)]


def test_its_schedule_is_simulated_under_its_name(installed: Path) -> None:
    ran = zsim(installed, "run", "tiny", *settings("zero.mine.colour=2"))
    assert ran.returncode == 0, ran.stderr


def test_its_schedule_is_written_read_again_and_proved(installed: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    made = zsim(installed, "plan", "tiny", *settings("zero.mine.colour=3"), "--schedule", str(file))
    assert made.returncode == 0, made.stderr
    assert '"type": "Mine"' in file.read_text("utf-8")
    proved = zsim(installed, "check", str(file))
    assert proved.returncode == 0, proved.stderr
    assert "no findings" in proved.stdout
    assert "volume" in proved.stdout


def test_an_option_that_it_does_not_have_is_named(installed: Path) -> None:
    refused = zsim(installed, "check", "tiny", *settings("zero.mine.color=2"))
    assert refused.returncode == 2
    assert "zero.mine.color: unknown key; did you mean colour?" in refused.stderr


def test_without_it_the_runtimes_that_there_are_are_named(tmp_path: Path) -> None:
    refused = zsim(tmp_path, "check", "tiny", "--set", "zero.emulate=mine")
    assert refused.returncode == 2
    assert "zero.emulate: 'mine' must be 'deepspeed', 'fsdp1', " in refused.stderr
