"""A package of somebody else adds a runtime: one folder and one entry point."""

from pathlib import Path

import pytest
from other_package import Answer, answers, install, zsim

ENTRY = "[zsim.runtimes]\nmine = renamed_fsdp2:RUNTIME\n"
SETTINGS = ("zero.stage=3", "zero.emulate=mine", "zero.bucket_elements=500_000_000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as an installer leaves it."""
    return install(tmp_path_factory.mktemp("site"), "renamed_fsdp2", ENTRY)


@pytest.fixture(scope="module")
def asked(folder: Path) -> dict[str, Answer]:
    """Return the output of commands that run one after the other."""
    file = str(folder / "mine.json")
    commands = {
        "run": ["run", "tiny", *settings("zero.mine.colour=2")],
        "plan": ["plan", "tiny", *settings("zero.mine.colour=3"), "--schedule", file],
        "check": ["check", file],
        "unknown option": ["check", "tiny", *settings("zero.mine.color=2")],
    }
    return dict(zip(commands, answers(folder, *commands.values()), strict=True))


def settings(*more: str) -> list[str]:
    return [word for each in (*SETTINGS, *more) for word in ("--set", each)]


@pytest.mark.one_commit_in(9)
def test_its_schedule_is_simulated_under_its_name(asked: dict[str, Answer]) -> None:
    assert asked["run"].returncode == 0, asked["run"].stderr


@pytest.mark.one_commit_in(9)
def test_its_schedule_is_written_read_again_and_proved(
    folder: Path, asked: dict[str, Answer]
) -> None:
    assert asked["plan"].returncode == 0, asked["plan"].stderr
    assert '"type": "Mine"' in (folder / "mine.json").read_text("utf-8")
    proved = asked["check"]
    assert proved.returncode == 0, proved.stderr
    assert "no findings" in proved.stdout
    assert "volume" in proved.stdout


@pytest.mark.one_commit_in(4)
def test_an_option_that_it_does_not_have_is_named(asked: dict[str, Answer]) -> None:
    refused = asked["unknown option"]
    assert refused.returncode == 2
    assert "zero.mine.color: unknown key; did you mean colour?" in refused.stderr


@pytest.mark.one_commit_in(9)
def test_without_it_the_runtimes_that_there_are_are_named(tmp_path: Path) -> None:
    refused = zsim(tmp_path, "check", "tiny", "--set", "zero.emulate=mine")
    assert refused.returncode == 2
    assert "zero.emulate: 'mine' must be 'deepspeed', 'fsdp1', " in refused.stderr
