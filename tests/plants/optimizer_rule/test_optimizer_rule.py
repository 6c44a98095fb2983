"""An element-wise rule of another package: one file and one entry point, none of zsim."""

import re
from pathlib import Path

import pytest
from other_package import Answer, answers, install_plant, python

HERE = Path(__file__).parent
FILES_AT_MOST = 4
SETTINGS = ("train.optimizer=adagrad", "train.lr_decay=0.1", "train.weight_decay=0.01")


def settings(*more: str) -> list[str]:
    return [word for each in (*SETTINGS, *more) for word in ("--set", each)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package as an installer leaves it."""
    return install_plant(tmp_path_factory.mktemp("site"), "optimizer_rule")


@pytest.fixture(scope="module")
def asked(site: Path) -> dict[str, Answer]:
    """Return the output of commands that run one after the other."""
    file = str(site / "adagrad.json")
    commands = {
        "run": ["run", "tiny", *settings()],
        "plan": ["plan", "tiny", *settings("zero.stage=1"), "--schedule", file],
        "check": ["check", file],
        "constant of another rule": ["check", "tiny", *settings("train.momentum=0.9")],
        "unknown constant": ["check", "tiny", *settings("train.lr_deca=0.9")],
    }
    return dict(zip(commands, answers(site, *commands.values()), strict=True))


def test_an_element_wise_rule_needs_at_most_four_files() -> None:
    files = {each.name for each in HERE.iterdir() if each.is_file()}
    plant = files - {"trained.py", Path(__file__).name}
    assert plant == {"adagrad.py", "entry_points.txt"}
    assert len(plant) <= FILES_AT_MOST


def test_no_source_file_names_the_planted_rule() -> None:
    root = HERE.parents[2]
    sources = [each for top in ("zsim", "backends") for each in (root / top).rglob("*.py")]
    named = re.compile("adagrad", re.IGNORECASE)
    assert sources
    assert not [str(each) for each in sources if named.search(each.read_text("utf-8"))]


def test_a_scenario_with_the_rule_is_simulated(asked: dict[str, Answer]) -> None:
    assert asked["run"].returncode == 0, asked["run"].stderr
    assert "optimizer " in asked["run"].stdout


def test_its_schedule_is_written_and_proved_with_values(
    site: Path, asked: dict[str, Answer]
) -> None:
    assert asked["plan"].returncode == 0, asked["plan"].stderr
    assert '"type": "Adagrad"' in (site / "adagrad.json").read_text("utf-8")
    proved = asked["check"]
    assert proved.returncode == 0, proved.stderr
    assert "no findings" in proved.stdout
    assert "Adagrad 0.001 as the contract says" in proved.stdout


def test_constants_that_the_rule_does_not_have_are_named(asked: dict[str, Answer]) -> None:
    refused = asked["constant of another rule"]
    assert refused.returncode == 2
    assert "train.momentum: 0.9 is not for adagrad, which takes learning_rate, lr_decay" in (
        refused.stderr
    )
    assert "did you mean lr_decay?" in asked["unknown constant"].stderr


def test_two_gloo_ranks_train_as_torchs_own_optimizer(site: Path) -> None:
    (site / "trained.py").write_text((HERE / "trained.py").read_text("utf-8"), "utf-8")
    trained = python(site, str(site / "trained.py"))
    assert trained.returncode == 0, trained.stderr
    apart = [float(line.split()[1]) for line in trained.stdout.splitlines()]
    assert len(apart) == 4  # two stages on two ranks
    assert max(apart) <= 1e-12
