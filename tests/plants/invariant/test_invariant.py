"""An invariant of another package: one file and one entry point, none of zsim."""

from pathlib import Path

import pytest
from other_package import Answer, answers, install_plant, plant_files, sources_that_name

SMALL, LARGE = "zero.bucket_elements=20_000", "zero.bucket_elements=500_000_000"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Return the output of commands that run one after the other."""
    site = install_plant(tmp_path_factory.mktemp("site"), "invariant")
    file = str(site / "large.json")
    commands = {
        "small": ["check", "tiny", "--set", SMALL],
        "large": ["check", "tiny", "--set", LARGE],
        "plan": ["plan", "tiny", "--set", LARGE, "--schedule", file],
        "file": ["check", file, "--explain", "1"],
        "run": ["run", "tiny", "--set", LARGE],
    }
    return dict(zip(commands, answers(site, *commands.values()), strict=True))


def test_an_invariant_needs_two_files_and_none_of_zsim() -> None:
    assert plant_files("invariant") == {"message_limit.py", "entry_points.txt"}
    assert sources_that_name("message_limit") == []


def test_a_schedule_without_a_finding_is_proved_with_the_words_of_the_family(
    asked: dict[str, Answer],
) -> None:
    assert asked["small"].returncode == 0, asked["small"].stdout
    proved = next(line for line in asked["small"].stdout.splitlines() if line.startswith("proved"))
    assert proved.endswith("messages of at most 131,072 bytes")


@pytest.mark.parametrize("name", ["large", "file"])
def test_a_finding_of_the_family_refutes_a_scenario_and_a_file(
    asked: dict[str, Answer], name: str
) -> None:
    assert asked[name].returncode == 1, asked[name].stderr
    assert "messages" in asked[name].stdout
    assert "at most 131,072 are allowed" in asked[name].stdout
    assert "messages of at most" not in asked[name].stdout


def test_a_schedule_that_the_family_refutes_is_not_run(asked: dict[str, Answer]) -> None:
    assert asked["run"].returncode != 0
    assert "messages" in asked["run"].stderr + asked["run"].stdout


def test_without_it_the_same_schedule_is_proved(tmp_path: Path) -> None:
    (proved,) = answers(tmp_path, ["check", "tiny", "--set", LARGE])
    assert proved.returncode == 0, proved.stdout
    assert "messages" not in proved.stdout
