"""`zsim.load`: a scenario by name, path or tables, changed by keys, with the CLI's one line."""

import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from notebook import shown_as

import zsim
import zsim_scenarios
from zsim.api.scenario import as_setting
from zsim.cli.main import answer
from zsim.scenario.toml import apply
from zsim.strategy.precision import Precision

TINY = zsim_scenarios.text("tiny")

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)


@given(VALUES)
def test_any_value_of_toml_arrives_as_it_was_given(value: object) -> None:
    tables: dict[str, Any] = {}
    apply(tables, as_setting("zero.fsdp2", value))
    assert tables == {"zero": {"fsdp2": value}}


def test_a_value_that_no_scenario_has_is_refused() -> None:
    with pytest.raises(zsim.MistakeError, match=r"^zero.stage: \{3\} must be a number, a string"):
        zsim.load("tiny", {"zero.stage": {3}})


def test_names_paths_and_tables_load_the_same_scenario(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TINY, "utf-8")
    loaded = [zsim.load(each) for each in ("tiny", path, str(path), tomllib.loads(TINY))]
    assert len({each.schedule for each in loaded[:1]} | {loaded[1].schedule}) == 1
    assert all(each.scenario == loaded[0].scenario for each in loaded)
    assert loaded[0].to_dict() == tomllib.loads(TINY)


def test_changes_are_values_of_python_and_none_takes_a_key_away() -> None:
    changes = {
        "zero.stage": 2,
        "train.precision": Precision.BF16,
        "cluster.gpu_memory": "40 GB",
        "zero.fsdp2": {"reshard_after_forward": True},
    }
    loaded = zsim.load("tiny", changes)
    assert loaded.scenario.zero.stage == 2
    assert loaded.scenario.train.precision is Precision.BF16
    assert loaded.scenario.cluster.gpu_memory == 40_000_000_000
    assert loaded.to_dict()["zero"]["fsdp2"] == {"reshard_after_forward": True}
    assert "fsdp2" not in loaded.changed({"zero.fsdp2": None}).to_dict()["zero"]
    assert zsim.load("tiny").scenario.zero.stage != 2  # what is shipped stays as it is


def test_tables_that_were_given_can_be_changed_afterwards() -> None:
    tables = tomllib.loads(TINY)
    loaded = zsim.load(tables, {"zero.stage": 1})
    tables["zero"]["stage"] = 9
    assert loaded.scenario.zero.stage == 1
    assert loaded.changed({"train.steps": 3}).scenario.zero.stage == 1


MISTAKES: list[dict[str, object]] = [
    {"zero.stge": 3},
    {"zero.stage": 9},
    {"parallel.tensor": 3},
    {"cluster.topology": "abacus"},
    {"cluster.gpu_memory": "32 Gb"},
    {"cluster.nodes": -3},
    {"model.layers": None},
]


@pytest.mark.parametrize("changes", MISTAKES, ids=str)
def test_a_mistake_has_the_one_line_of_the_command_line(
    changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"--set={as_setting(key, value)}" for key, value in changes.items()]
    assert answer(["plan", "tiny", *settings]) == 2
    with pytest.raises(zsim.MistakeError) as mistake:
        zsim.load("tiny", changes).plan()
    assert capsys.readouterr().err == f"zsim: {mistake.value}\n"


@pytest.mark.parametrize("name", ["abacus", "", "/no/such/file.toml"])
def test_a_name_that_nothing_has_is_told_with_what_ships(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["plan", name]) == 2
    with pytest.raises(zsim.MistakeError) as mistake:
        zsim.load(name)
    assert capsys.readouterr().err == f"zsim: {mistake.value}\n"


def test_what_is_no_scenario_at_all_is_refused() -> None:
    with pytest.raises(zsim.MistakeError, match=r"^scenario: 3 must be a name, a path, or tables"):
        zsim.load(cast("Any", 3))


def test_a_schedule_in_a_file_is_loaded_with_its_model_and_cluster(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    assert answer(["plan", "tiny", "--schedule", str(path)]) == 0
    loaded, made = zsim.load(path), zsim.load("tiny")
    assert (loaded.schedule, loaded.model, loaded.cluster) == (
        made.schedule,
        made.model,
        made.cluster,
    )
    with pytest.raises(zsim.MistakeError, match=r"--set: .*schedule.json is a schedule"):
        zsim.load(path, {"zero.stage": 1})
    with pytest.raises(zsim.MistakeError, match=r"a schedule; only a scenario has tables"):
        loaded.to_dict()


def test_so_many_ranks_and_steps_are_in_the_title_and_in_the_job() -> None:
    loaded = zsim.load("tiny", ranks=8, steps=3)
    assert (loaded.job.schedule.mesh.size, loaded.job.steps) == (8, 3)
    assert loaded.title.endswith(", with train.steps = 3, ranks = 8")
    assert str(loaded) == loaded.title


def test_a_notebook_shows_every_table_with_what_was_changed() -> None:
    shown = shown_as(zsim.load("tiny", {"title": "<b>&", "zero.stage": 1}), "html")
    assert "&lt;b&gt;&amp;" in shown
    assert "stage = 1" in shown
