"""The command line: what it answers, in which words, with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_answers import Ask, answered, planted, refused

from zsim.backend.document import decode_trace
from zsim.cli.option import Code

ZSIM = Path(sys.executable).parent / "zsim"

SETTINGS = {
    "zero.stge=3": "zero.stge: unknown key; did you mean stage?",
    "cluster.gpu_memory=32 Gb": "cluster.gpu_memory: '32 Gb' must be a size such as",
    "cluster.gpu_memory=32 parsecs": "cluster.gpu_memory: '32 parsecs' must be a size such as",
    "parallel.tensor=3": "parallel.tensor: 3 must divide the 16 ranks of the cluster",
    "cluster.nodes=0": "cluster.nodes: 0 must be at least 1",
    "cluster.nodes=-3": "cluster.nodes: -3 must be at least 1",
    "cluster.topology=abacus": "cluster.topology: 'abacus' must be one of dgx",
    "zero.stage=9": "zero.stage: 9 must be 0, 1, 2 or 3",
    "model.attention_heads=3": "model.attention_heads: 3 must divide hidden_size 8",
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("command", ["run", "check", "plan"])
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    command: str, setting: str, ask: Ask, scenario: Path
) -> None:
    line = refused(ask(command, scenario, "--set", setting, "--json"))
    assert line.startswith(f"{scenario}: {SETTINGS[setting]}")


@pytest.mark.parametrize("setting", ["zero.stage", "=3", "zero.stage=[", "zero.stage=3\n[x]", ""])
def test_a_setting_that_is_none_is_refused(setting: str, ask: Ask, scenario: Path) -> None:
    assert "--set: " in refused(ask("run", scenario, "--set", setting))


FILES = {
    "empty": (b"", "empty; a scenario has title, model"),
    "binary": (bytes(range(256)), "not text: scenarios are TOML"),
    "utf-16": ("title = 1".encode("utf-16"), "not text: "),
    "nulls": (bytes(64), "not TOML: "),
    "not TOML": (b"title = [", "not TOML: "),
    "a list": (b"[1, 2]", "not TOML: "),
    "other TOML": (b"[tool.ruff]\nline-length = 100", "tool: unknown key; "),
    "half JSON": (b'{"zsim": "job",', "not JSON: "),
    "other JSON": (b'{"a": 1}', 'zsim: missing; must be "job"'),
}


@pytest.mark.matrix(9)
@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("command", ["run", "check", "plan"])
def test_a_file_that_is_no_scenario_is_refused(
    command: str, what: str, ask: Ask, tmp_path: Path
) -> None:
    content, why = FILES[what]
    path = tmp_path / "file"
    path.write_bytes(content)
    assert refused(ask(command, path)).startswith(f"{path}: {why}")


def test_a_name_that_is_not_there_is_refused_with_the_command_that_lists_names(ask: Ask) -> None:
    line = refused(ask("run", "nowhere"))
    assert line == "scenario: 'nowhere' must be a file, or a name that zsim list scenarios prints"


def test_a_folder_is_no_scenario(ask: Ask, tmp_path: Path) -> None:
    assert refused(ask("run", tmp_path)) == f"{tmp_path}: is a directory"


def test_a_name_that_no_file_can_have_is_refused(ask: Ask) -> None:
    assert refused(ask("run", "a\0b")).startswith("scenario: 'a\\x00b' must be")
    assert refused(ask("run", "")).startswith("scenario: '' must be a file, or a name ")


def test_an_unknown_backend_is_refused_with_those_registered(ask: Ask, scenario: Path) -> None:
    line = refused(ask("run", scenario, "--backend", "abacus"))
    assert line == "backend: 'abacus' must be one of null, sim, torch"


def test_a_backend_that_reads_no_data_says_so(ask: Ask, scenario: Path) -> None:
    line = refused(ask("run", scenario, "--data", "x.txt"))
    assert line == "--data: x.txt: backend sim reads no data"


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("fly",), "No such command 'fly' (see zsim --help)"),
        (("run",), "Missing argument 'SCENARIO|FILE.json' (see zsim run --help)"),
        (("run", "tiny", "--sed", "3"), "No such option: --sed"),
        (("run", "tiny", "--seed", "x"), "Invalid value for '--seed': 'x' must be a whole number"),
        (("run", "tiny", "--seed", "-1"), "Invalid value for '--seed': '-1' must be"),
        (("run", "tiny", "--ranks", "0"), "Invalid value for '--ranks': '0' must be"),
        (("run", "tiny", "--steps", "0"), "Invalid value for '--steps': '0' must be"),
        (("run", "tiny", "--steps", "1e3"), "Invalid value for '--steps': '1e3' must be"),
        (("show", "abacus"), "name: 'abacus' must be a name that zsim list prints"),
        (("check", "tiny", "--explain", "1"), "--explain: 1 has no finding"),
        (
            ("plan", "tiny", "--schedule", "/no/such/folder/x.json"),
            "--schedule: /no/such/folder/x.json: /no/such/folder is no folder",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    words: tuple[str, ...], why: str, ask: Ask
) -> None:
    assert refused(ask(*words)).startswith(why)


def test_without_a_command_there_is_help_with_every_summary_in_a_line(ask: Ask) -> None:
    code, out, error = ask()
    assert (code, error) == (0, "")
    assert "\nCommands:\n" in out
    assert "..." not in out.partition("Commands:")[2]


def test_a_plan_has_the_keys_that_other_tools_rely_on(ask: Ask, scenario: Path) -> None:
    plan = answered(ask("plan", scenario, "--json"))
    assert set(plan) >= {
        "ranks",
        "mesh",
        "parameters",
        "model_state_bytes",
        "memory_bytes",
        "wire_bytes_per_rank",
        "scalar_wire_bytes_per_rank",
        "operations",
    }
    assert plan["ranks"] == 16
    assert plan["mesh"] == {"data": 8, "tensor": 2}
    assert plan["memory_bytes"].keys() >= {"parameter", "gradient", "moment", "saved"}
    assert plan["wire_bytes_per_rank"]["data"].keys() == {"all_gather", "reduce_scatter"}
    assert plan["wire_bytes_per_rank"]["tensor"].keys() == {"all_reduce", "all_gather"}
    assert plan["scalar_wire_bytes_per_rank"].keys() == {"world"}  # norm and overflow


def test_a_run_has_the_keys_that_other_tools_rely_on(ask: Ask, scenario: Path) -> None:
    run = answered(ask("run", scenario, "--seed", "7", "--json"))
    assert set(run) >= {
        "backend",
        "step_time_s",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "mfu",
        "hfu",
        "causal_model_tflops_per_gpu",
        "causal_hardware_tflops_per_gpu",
        "causal_mfu",
        "causal_hfu",
        "tokens_per_s",
        "peak_allocated_bytes",
        "exposed_communication_s",
        "fits",
        "error",
        "seed",
        "wall_time_s",
    }
    assert run["backend"] == "sim"
    assert run["fits"] is True
    assert run["seed"] == 7
    assert run["error"]["text"].startswith("unknown: ")
    # Full checkpointing runs each block's forward twice.
    assert run["hardware_tflops_per_gpu"] > run["model_tflops_per_gpu"] > 0


def test_a_check_has_the_keys_that_other_tools_rely_on(ask: Ask, scenario: Path) -> None:
    answer = answered(ask("check", scenario, "--json"))
    assert (answer["findings"], answer["not_shown"]) == ([], [])
    proved = answer["proved"]
    assert isinstance(proved, list)
    assert proved[0] == "order"
    assert "volume" in proved


def test_a_run_says_at_most_15_lines(ask: Ask, scenario: Path) -> None:
    code, out, _ = ask("run", scenario)
    assert code == 0
    assert len(out.splitlines()) <= 15
    assert all(len(line) <= 110 for line in out.splitlines())


@pytest.mark.one_commit_in(9)
def test_a_run_that_does_not_fit_is_an_answer_with_exit_code_1(ask: Ask, scenario: Path) -> None:
    small = ("--set", "cluster.gpu_memory=1 kB")
    code, out, error = ask("run", scenario, *small, "--json")
    assert (code, error) == (1, "")
    assert json.loads(out)["fits"] is False
    code, out, _ = ask("run", scenario, *small)
    assert code == 1
    assert "no" in out.splitlines()[1]


def test_ranks_replace_the_cluster(ask: Ask, tmp_path: Path, scenario: Path) -> None:
    path = tmp_path / "trace.json"
    assert ask("run", scenario, "--ranks", "64", "--trace", path)[0] == 0
    trace = decode_trace(path.read_text("utf-8"))
    assert sum(rank.stands_for for rank in trace.ranks) == 64
    line = refused(ask("run", scenario, "--ranks", "5"))
    assert line == f"{scenario}: parallel.tensor: 2 must divide the 5 ranks"


def test_a_trace_that_cannot_be_written_is_the_callers_mistake(ask: Ask, scenario: Path) -> None:
    line = refused(ask("run", scenario, "--trace", "/no/such/folder/x.json"))
    assert line == "--trace: /no/such/folder/x.json: /no/such/folder is no folder"


def test_list_names_what_ships(ask: Ask) -> None:
    code, out, _ = ask("list")
    assert code == 0
    for name in ("zero_100b", "dgx2_infiniband", "sim", "torch", "null"):
        assert f"  {name}" in out


def test_what_show_prints_is_a_scenario(ask: Ask, tmp_path: Path) -> None:
    code, out, _ = ask("show", "tiny")
    assert code == 0
    path = tmp_path / "mine.toml"
    path.write_text(out, "utf-8")
    assert ask("plan", path, "--json") == ask("plan", "tiny", "--json")


def test_a_topology_of_ones_own_is_a_file_in_the_form_of_those_that_ship(
    ask: Ask, scenario: Path, tmp_path: Path
) -> None:
    text = ask("show", "dgx2")[1]
    path = tmp_path / "mine.toml"
    setting = f"cluster.topology={path}"
    path.write_text(text.replace("gpus = 16", "gpus = 4"), "utf-8")
    assert answered(ask("plan", scenario, "--set", setting, "--json"))["ranks"] == 4
    path.write_text(text.replace('"150 GB/s"', '"150 Gb/s"'), "utf-8")
    line = refused(ask("plan", scenario, "--set", setting))
    assert line.startswith(f"{scenario}: cluster.topology: {path}: switch.bandwidth_per_direction")
    assert "bits are not accepted" in line
    path.write_text(text.replace('"150 GB/s"', '"0 GB/s"'), "utf-8")
    assert "bandwidth must be more than 0" in refused(ask("plan", scenario, "--set", setting))
    path.write_bytes(b"\xff")
    assert "not text" in refused(ask("plan", scenario, "--set", setting))
    path.unlink()
    assert "no such file" in refused(ask("plan", scenario, "--set", setting))


def test_our_own_bug_is_one_line_that_names_the_file_with_the_details(
    ask: Ask, scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("\n[bold]planted[/bold]")

    monkeypatch.setattr("zsim.api.plan_result.plan", broken)
    code, out, error = ask("plan", scenario)
    assert (code, out) == (Code.FAILED, "")
    assert error.count("\n") == 1
    assert "[bold]planted[/bold]" in error
    path = Path(error.rsplit("details: ")[1].strip().removesuffix(")"))
    assert "Traceback" in path.read_text("utf-8")
    path.unlink()


def test_an_interrupt_is_exit_code_130(
    ask: Ask, scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zsim.api.plan_result.plan", interrupted)
    code, out, error = ask("plan", scenario)
    assert (code, out, error) == (130, "", "zsim: interrupted\n")


@pytest.mark.one_commit_in(12)
def test_a_name_that_the_terminal_cannot_show_is_printed_in_escapes(
    schedule: Path,
) -> None:
    planted(schedule, lambda data: data["schedule"].update(name="\ud800\u2500"))
    done = subprocess.run(
        [ZSIM, "check", schedule],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\ud800\\u2500: no findings\nproved: order, values (")


def test_list_of_one_kind_has_that_alone(ask: Ask) -> None:
    code, out, _ = ask("list", "models")
    assert code == 0
    assert out.splitlines()[0] == "models"
    assert "Llama 3, 70,553,706,496 parameters" in out
    assert "dgx2_infiniband" not in out
    assert ask("list", "modles") == (
        2,
        "",
        "zsim: kind: 'modles': did you mean models? It must be one of scenarios, studies, models, "
        "topologies, nodes, fabrics, gpus, runtimes, backends\n",
    )


def test_a_model_is_run_and_shown_by_its_name(ask: Ask) -> None:
    setting = "model.name=EleutherAI/pythia-70m"
    code, out, _ = ask("plan", "tiny", "--set", setting, "--set", "model.layers=1", "--json")
    assert code == 0
    assert json.loads(out)["parameters"] == 70_426_624 - 5 * (12 * 512**2 + 13 * 512)
    code, out, _ = ask("show", "eleutherai/PYTHIA-70M")
    assert code == 0
    assert "hidden_size = 512" in out
    code, _, error = ask("show", "pythia-70b")
    assert code == 2
    assert error.startswith("zsim: name: 'pythia-70b': did you mean pythia-70m? ")
