"""Manners of the command line: version, short help, completion, suggestions, full disks."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from command_answers import Ask, answered, refused

from zsim.cli.main import answer

ZSIM = Path(sys.executable).parent / "zsim"


def test_the_version_is_that_of_the_package(ask: Ask) -> None:
    assert ask("--version") == (0, f"zsim {version('zsim')}\n", "")


@pytest.mark.parametrize("words", [(), ("run",), ("topology",)])
def test_a_short_h_asks_for_help(ask: Ask, words: tuple[str, ...]) -> None:
    code, out, error = ask(*words, "-h")
    assert (code, error) == (0, "")
    assert out.startswith("Usage: ")
    assert ask(*words, "--help")[1] == out


COMPLETED = {
    "zsim ru": ["run"],
    "zsim run ll": [
        "llama2_70b_offload",
        "llama2_7b",
        "llama2_7b_workstation",
        "llama3_70b",
    ],
    "zsim check zero_c": ["zero_c1", "zero_c2", "zero_c3", "zero_c4", "zero_c5"],
    "zsim run tiny --backend t": ["torch"],
    "zsim run tiny --set zero.sta": ["zero.stage="],
    "zsim compare tiny --but model.lay": ["model.layers="],
    "zsim sweep n": ["nics", "nvswitch"],
    "zsim topology dgx_h1": ["dgx_h100_infiniband", "dgx_h100"],
    "zsim show rail_": ["rail_only", "rail_optimized"],
    "zsim run nothing_of_the_kind": [],
}


@pytest.mark.matrix(21)
@pytest.mark.parametrize("line", COMPLETED)
def test_a_shell_completes_commands_names_and_keys(line: str) -> None:
    words = line.split()
    asked = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_ZSIM_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [ZSIM], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == COMPLETED[line]


SUGGESTED = {
    "run llama2": "llama2_7b",
    "run TINY_lama": "tiny_llama",
    "sweep nic": "nics",
    "show dgx_h10": "dgx_h100",
    "topology dgx_h10": "dgx_h100",
    "topology dgx_h100 --fabric rail_optimised": "rail_optimized",
    "run tiny --set cluster.topology=dgx_h100_infinband": "dgx_h100_infiniband",
    "run tiny --set compute.profile=H10": "h100",
    "run tiny --set network.profile=a10": "a100",
    "run tiny --backend torhc": "torch",
    "topology p3": "p3_16xlarge",
    "topology 8xp3": "p3_16xlarge",
    "topology 8xh10": "h100",
}


@pytest.mark.parametrize("words", SUGGESTED)
def test_a_name_that_is_nearly_right_is_suggested(ask: Ask, words: str) -> None:
    assert f": did you mean {SUGGESTED[words]}? It must be " in refused(ask(*words.split()))


def test_a_node_that_is_nearly_right_is_suggested(ask: Ask) -> None:
    words = ["--set=cluster.topology=none", "--set=cluster.fabric=fat_tree_2"]
    line = refused(ask("run", "tiny", *words, "--set=cluster.node=dgx_h10"))
    start = "tiny: cluster.node: 'dgx_h10': did you mean dgx_h100? It must be one of a100_pcie_8, "
    assert line.startswith(start)


HINTS = {
    "run llama3.1-8b": "scenario: 'llama3.1-8b' is a model: zsim best llama3.1-8b --gpus 8xh100 ",
    "run qwen": "scenario: 'qwen' is the start of names of models: qwen2.",
    "run nofile.toml": "scenario: 'nofile.toml': there is no such file",
    "run tiny --set stage=3": "tiny: stage: unknown key; did you mean zero.stage? allowed: title, ",
    "best llama3.1-8b --gpus 8h100": "--gpus: '8h100': did you mean 8xh100?",
    "run abacus": "scenario: 'abacus' must be a file, or a name that zsim list scenarios prints",
}


@pytest.mark.parametrize("words", HINTS)
def test_a_mistake_comes_with_the_hint_that_mends_it(ask: Ask, words: str) -> None:
    assert refused(ask(*words.split())).startswith(HINTS[words])


def test_gpus_are_called_alike_by_every_command(ask: Ask) -> None:
    """As `--gpus` of `best` calls them."""
    assert answered(ask("topology", "16xh100", "--json")) == answered(
        ask("topology", "dgx_h100", "--nodes", "2", "--json")
    )
    assert ask("show", "4090") == ask("show", "rtx_4090_24gb")


def test_a_number_of_gpus_of_a_file_is_a_topology(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, _ = ask("show", "gpu", "--template")
    assert code == 0
    Path("mine.toml").write_text(text, "utf-8")
    found = answered(ask("topology", "4xmine.toml", "--json"))
    assert found == answered(ask("topology", "mine.toml", "--json"))
    assert ask("topology", "4xnone.toml")[0] == 2


def test_a_name_that_is_like_no_other_is_not_guessed(ask: Ask) -> None:
    assert "did you mean" not in refused(ask("run", "abacus"))


@pytest.mark.one_commit_in(6)
def test_none_takes_a_key_or_a_table_away(ask: Ask) -> None:
    emulated = answered(ask("plan", "llama2_7b", "--set", "zero.emulate=fsdp2", "--json"))
    words = ("--set", "zero.emulate=fsdp2", "--set", "zero.emulate=none", "--json")
    plain = answered(ask("plan", "llama2_7b", *words))
    assert plain == answered(ask("plan", "llama2_7b", "--json"))
    assert plain["operations"] != emulated["operations"]
    profiles = ("--set", "compute.profile=a100", "--set", "compute=none", "--no-check", "--json")
    times = [
        answered(ask("run", "tiny", *words))["step_time_s"]
        for words in (profiles, profiles[:2] + profiles[4:], profiles[4:])
    ]
    assert times[0] == times[2] != times[1]


def test_a_key_that_does_not_exist_cannot_be_taken_away(ask: Ask) -> None:
    line = refused(ask("run", "tiny", "--set", "zero.emulat=none"))
    assert line.startswith("tiny: zero.emulat: unknown key; did you mean emulate?")
    line = refused(ask("run", "tiny", "--set", "model.layers=none"))
    assert line.startswith("tiny: model.layers: missing; ")


@pytest.mark.matrix(18)
@pytest.mark.parametrize(
    "words", ["plan tiny", "run tiny --json", "check tiny", "list", "show tiny", "--help"]
)
def test_a_full_disk_behind_the_answer_is_no_internal_error(words: str) -> None:
    command = f"{ZSIM} {words} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr == "zsim: the answer could not be written: no space left on device\n"


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("words", "code"), [("plan tiny", 4), ("plan abacus", 2)])
def test_where_nothing_can_be_written_the_exit_code_says_so(words: str, code: int) -> None:
    command = f"{ZSIM} {words} > /dev/full 2>&1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_full_disk_behind_another_file_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/data/spool")

    monkeypatch.setattr("zsim.api.launch.load_backend", full)
    assert answer(["run", "tiny"]) == 3
    assert capsys.readouterr().err == "zsim: /data/spool: no space left on device\n"


def test_an_internal_error_is_told_where_its_details_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zsim.api.launch.load_backend", broken)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    assert answer(["run", "tiny"]) == 3
    why = "(details could not be written: no space left on device)"
    assert capsys.readouterr().err == f"zsim: internal error: RuntimeError: broken {why}\n"
