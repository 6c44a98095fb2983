"""Chakra execution traces on the command line: written, run, checked, and refused in one line."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_answers import Ask, answered, refused


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from zsim.cli.main import answer  # noqa: PLC0415 (before a test takes its output)

    folder = tmp_path_factory.mktemp("chakra") / "traces"
    assert answer(["run", "tiny", "--no-check", "--chakra", str(folder), "--json"]) == 0
    return folder


@pytest.fixture
def traces(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "traces"))


def test_every_rank_has_a_file_and_groups_have_their_ranks(written: Path) -> None:
    names = sorted(path.name for path in written.iterdir())
    assert names == ["comm_groups.json", *(f"zsim.{rank}.et" for rank in range(4))]
    groups = json.loads((written / "comm_groups.json").read_text("utf-8"))
    assert groups["1"] == [0, 1, 2, 3]


@pytest.mark.one_commit_in(6)
def test_traces_are_proved_and_run_on_the_cluster_of_a_scenario(ask: Ask, written: Path) -> None:
    assert answered(ask("check", written, "--json"))["findings"] == []
    tiny = answered(ask("run", "tiny", "--no-check", "--json"))
    again = answered(ask("run", written / "zsim", "--cluster", "tiny", "--json"))
    assert again["step_time_s"] == pytest.approx(tiny["step_time_s"], rel=0.003)
    assert again["tokens_per_s"] == 0


def test_traces_without_a_cluster_are_not_run(ask: Ask, written: Path) -> None:
    said = refused(ask("run", written))
    assert said == f"{written}: cluster: missing; a run needs it, a check does not"


def _no_rank(folder: Path) -> None:
    (folder / "zsim.1.et").unlink()


def _two_runs(folder: Path) -> None:
    shutil.copy(folder / "zsim.0.et", folder / "other.0.et")


def _cut(folder: Path) -> None:
    path = folder / "zsim.1.et"
    path.write_bytes(path.read_bytes()[:3000])


def _renamed(folder: Path) -> None:
    for path in folder.glob("*.et"):
        path.rename(folder / f"{path.stem}-old.et")


def _groups(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "comm_groups.json").write_text(text, "utf-8")

    return change


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_no_rank, "has no file of rank 1, but one of 3"),
        (_two_runs, "has several runs: other and zsim; name one"),
        (_cut, "zsim.1.et: node 22 cannot be read"),
        (_renamed, "has no Chakra traces: files PREFIX.RANK.et"),
        (_groups("[1"), "comm_groups.json: is no JSON"),
        (_groups("[1]"), "comm_groups.json: group '': must be a list of ranks"),
        (_groups('{"1": [0, "1"]}'), "group '1': must be a list of ranks"),
        (_groups('{"1": [0, 9]}'), "group 1: must hold ranks from 0 to 3"),
        (_groups("{}"), "pg_name: '1' is no group"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    ask: Ask, traces: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(traces)
    assert why in refused(ask("run", traces, "--cluster", "tiny"))


def test_a_folder_called_as_a_scenario_does_not_hide_it(
    ask: Ask, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces.rename(traces.parent / "tiny")
    monkeypatch.chdir(traces.parent)
    assert answered(ask("run", "tiny", "--no-check", "--json"))["tokens_per_s"] > 0


def test_a_folder_without_traces_is_no_scenario(ask: Ask, tmp_path: Path) -> None:
    assert refused(ask("run", tmp_path)).startswith(f"{tmp_path}: is a directory")


def test_a_file_cannot_be_the_folder(ask: Ask, written: Path) -> None:
    said = refused(ask("run", "tiny", "--chakra", written / "zsim.0.et"))
    assert said.startswith("--chakra: ")


def test_without_protobuf_one_line_says_what_to_install(
    ask: Ask, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    for module in ("zsim.files.chakra_files", "zsim.trace.chakra_schema"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for words in (("run", "tiny", "--chakra", written), ("run", written, "--cluster", "tiny")):
        said = refused(ask(*words))
        assert "Chakra traces need protobuf" in said
        assert "pip install 'zsim[chakra]'" in said
