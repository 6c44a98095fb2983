"""`zsim sweep`: the answer, the rows, what is kept, and what goes wrong."""

import csv
import json
import sqlite3
from collections.abc import Callable, Generator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import zsim_scenarios
from zsim.cli.main import answer
from zsim.cli.progress_bar import progress
from zsim.cluster.profile.network import NetworkProfile
from zsim.files.installed import network_profile
from zsim.workers.processes import InProcess
from zsim_study.workers.worker import FinishedRun, RunBatch, run_batch
from zsim_study.workers.worker_pool import WorkerPool

STUDY = """
question = "how is a small model cut?"
[base]
scenario = "tiny"
cluster.nodes = 1
parallel.data = 8
train = { steps = 2, precision = "bf16" }
[[axis]]
field = "zero.stage"
values = [1, 3]
[[axis]]
name = "NICs"
field = "cluster.nics_per_node"
values = [8, 2]
[[axis]]
name = "as"
variants.planned = {}
variants.secondary.zero.secondary = 4
variants.small.cluster.gpu_memory = "1 MB"
variants.slow.fault = [{ kind = "gpu", rank = 1, factor = 2 }]
"""

RUN_BATCH = "zsim_study.workers.work.run_batch"

Json = dict[str, Any]
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """Run a command line in an empty folder with a study; exit code, output, error."""
    monkeypatch.chdir(tmp_path)
    Path("cut.toml").write_text(STUDY, "utf-8")

    def asked(*words: str) -> tuple[int, str, str]:
        code = answer(words)
        captured = capsys.readouterr()
        return int(code), captured.out, captured.err

    return asked


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each batch had that was run here."""
    found: list[int] = []

    def counted(batch: RunBatch) -> list[FinishedRun]:
        found.append(len(batch.scenarios))
        return run_batch(batch)

    monkeypatch.setattr(RUN_BATCH, counted)
    return found


def swept(asked: tuple[int, str, str], code: int = 0) -> Json:
    assert (asked[0], asked[2]) == (code, "")
    found: Json = json.loads(asked[1])
    return found


@pytest.mark.one_commit_in(6)
def test_every_combination_is_a_row_with_its_figures_or_its_reason(ask: Ask) -> None:
    found = swept(ask("sweep", "cut.toml", "--workers", "1", "--json", "--csv", "rows.csv"))
    ends = {run["name"]: run["status"] for run in found["runs"]}
    assert ends == {
        f"stage={stage}, NICs={nics}, as={how}": status
        for stage in (1, 3)
        for nics in (8, 2)
        for how, status in {
            "planned": "done",
            "secondary": "done" if stage == 3 else "impossible",
            "small": "does not fit",
            "slow": "done",
        }.items()
    }
    reasons = {run["as"]: run["reason"] for run in reversed(found["runs"])}
    assert reasons["planned"] == reasons["slow"] == ""
    assert "zero.secondary: 4" in reasons["secondary"]
    assert reasons["small"].startswith("out of memory at ")
    assert found["answer"].startswith("fastest: stage=")
    assert found["best"].endswith("as=planned")
    assert "sequences a step" in found["held_fixed"]
    with Path("rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step_time_s"]) if row["step_time_s"] else None for row in rows] == [
        run["step_time_s"] for run in found["runs"]
    ]


@pytest.mark.one_commit_in(6)
def test_every_run_is_a_line_and_why_it_ended_stands_below_once(ask: Ask) -> None:
    code, out, _ = ask("sweep", "cut.toml", "--workers", "1")
    assert code == 0
    table, _, below = out.partition("─\n")[2].partition("\n\n")
    lines = table.splitlines()
    assert len(lines) == 16
    assert sum(line.endswith("does not fit") for line in map(str.rstrip, lines)) == 4
    assert sum(line.endswith("impossible") for line in map(str.rstrip, lines)) == 2
    assert below.count("out of memory at ") == 1
    assert "--csv FILE has the reason of all 4" in " ".join(below.split())


@pytest.mark.matrix(6)
@pytest.mark.parametrize("settings", [(), ("fault=[{kind='gpu',rank=1,factor=2}]",)])
def test_a_row_says_what_a_run_says(ask: Ask, settings: tuple[str, ...]) -> None:
    """Later trials of a schedule are not recorded in full: their figures are the same."""
    rows = swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))["runs"]
    name = "stage=3, NICs=2, as=slow" if settings else "stage=3, NICs=2, as=planned"
    (row,) = [run for run in rows if run["name"] == name]
    changes = ("zero.stage=3", "cluster.nics_per_node=2", "cluster.nodes=1", "parallel.data=8")
    batch = (f"train.micro_batch_size={row['micro_batch_size']}",)
    steps = (f"train.gradient_accumulation_steps={row['gradient_accumulation_steps']}",)
    words = (*changes, *batch, *steps, "train.steps=2", "train.precision=bf16", *settings)
    asked = ask("run", "tiny", "--json", *(f"--set={each}" for each in words))
    run = swept(asked)
    same = ("step_time_s", "exposed_communication_s", "tokens_per_s", "mfu", "peak_reserved_bytes")
    assert {key: row[key] for key in same} == {key: run[key] for key in same}


@pytest.mark.one_commit_in(6)
def test_a_second_sweep_repeats_nothing_and_a_change_reruns_what_it_touches(
    ask: Ask, tried: list[int]
) -> None:
    first = swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))
    assert sum(tried) == 14
    tried.clear()
    assert swept(ask("sweep", "cut.toml", "--workers", "1", "--json")) == first
    assert tried == []
    Path("cut.toml").write_text(STUDY.replace("[8, 2]", "[8, 2, 1]"), "utf-8")
    swept(ask("sweep", "cut.toml", "--workers", "1", "--json", "--store", "cut.sqlite"))
    assert sum(tried) == 7  # the new NICs alone: four ways of stage 3, three of stage 1


def test_a_changed_profile_reruns_what_takes_it(
    ask: Ask, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = '[[axis]]\nfield = "network.profile"\nvalues = ["a100", "h100"]\n'
    Path("cut.toml").write_text(STUDY.partition("[[axis]]")[0] + profiles, "utf-8")
    swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))
    assert sum(tried) == 2

    def changed(name: str) -> NetworkProfile:
        found = network_profile(name)
        return found.changed(launch_s=1.0) if name == "h100" else found

    monkeypatch.setattr("zsim_study.workers.study_source.network_profile", changed)
    swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))
    assert sum(tried) == 2 + 1


def test_a_dry_run_counts_and_estimates_and_keeps_nothing(ask: Ask, tried: list[int]) -> None:
    code, out, _ = ask("sweep", "cut.toml", "--dry-run", "--workers", "2")
    assert code == 0
    # 2 stages x 2 NICs x 4 ways; all of a stage have one schedule, but for secondary shards.
    assert "16, 2 of them impossible; 14 are left, with 3 schedules" in out
    assert "s on 2 cores" in out
    assert not Path("cut.sqlite").exists()
    assert tried == []
    assert swept(ask("sweep", "cut.toml", "--dry-run", "--json"))["schedules"] == 3


@pytest.mark.one_commit_in(12)
def test_the_terminal_has_the_answer_first_then_at_most_20_rows(ask: Ask) -> None:
    many = STUDY.replace("[8, 2]", "[8, 7, 6, 5, 4, 3, 2]")
    Path("cut.toml").write_text(many, "utf-8")
    code, out, error = ask("sweep", "cut.toml", "--workers", "1")
    assert (code, error) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "how is a small model cut?"
    assert lines[1].startswith("fastest: stage=")
    assert "and 36 more: all with --csv FILE" in lines  # 2 x 7 x 4 - 20
    assert sum(line.startswith(("1 ", "3 ")) for line in lines) == 20
    assert "56; 7 impossible, 14 do not fit" in out
    assert "unknown: times come from" in " ".join(out.split())
    assert "cut.sqlite" in out


@pytest.mark.one_commit_in(6)
def test_differences_below_the_error_are_in_brackets(ask: Ask) -> None:
    """llama2_7b on a node of A100 under FSDP1: its error is known, and it uses no NIC."""
    on_a100 = "\n".join(
        (
            '"llama2_7b"',
            'zero.emulate = "fsdp1"',
            'cluster.topology = "dgx_a100_infiniband"',
            'compute.profile = "a100"',
            'network.profile = "a100"',
            "model.sequence_length = 2048",
        )
    )
    judged = STUDY.replace('"tiny"', on_a100).replace(
        "steps = 2", "steps = 2, micro_batch_size = 4"
    )
    judged = judged.replace("parallel.data = 8\n", "")
    nics = judged.partition("[[axis]]")[0] + '[[axis]]\nfield = "cluster.nics_per_node"\n'
    Path("cut.toml").write_text(nics + "values = [8, 7]", "utf-8")
    out = ask("sweep", "cut.toml", "--workers", "1")[1]
    assert "(+0.0%)" in out
    assert "differences within the error of the ratio of two step times" in out
    (row, _) = swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))["runs"]
    assert 0 < row["error"] < 0.5
    assert f"±{row['error']:.0%}".replace("%", " %") in " ".join(out.split())


@pytest.mark.one_commit_in(6)
def test_the_answer_is_no_if_no_run_meets_the_goal(ask: Ask) -> None:
    Path("cut.toml").write_text(f"{STUDY}[goal]\nmax_step_time = '1 ns'\n", "utf-8")
    found = swept(ask("sweep", "cut.toml", "--workers", "1", "--json"), code=1)
    assert found["best"] is None
    assert found["answer"].startswith("none of 16 runs meets the goal: ")


@pytest.mark.one_commit_in(9)
def test_processes_and_one_process_find_the_same(ask: Ask) -> None:
    alone = swept(ask("sweep", "cut.toml", "--workers", "1", "--json", "--store", "1.sqlite"))
    both = swept(ask("sweep", "cut.toml", "--workers", "2", "--json", "--store", "2.sqlite"))
    assert alone == both


@pytest.mark.one_commit_in(6)
def test_an_error_of_our_own_is_a_row_and_is_tried_again(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("zsim_study.study.proved.Proved.tried", broken)
        found = swept(ask("sweep", "cut.toml", "--workers", "1", "--json"), code=1)
    assert {run["status"] for run in found["runs"]} == {"failed", "impossible"}
    assert "internal error: KeyError: 'gone'" in {run["reason"] for run in found["runs"]}
    assert swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))["best"] is not None


@pytest.mark.one_commit_in(6)
def test_an_interrupted_sweep_keeps_what_was_done_and_says_how_to_go_on(
    ask: Ask, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(batch: RunBatch) -> list[FinishedRun]:
        if tried:
            raise KeyboardInterrupt
        tried.append(len(batch.scenarios))
        return run_batch(batch)

    with monkeypatch.context() as patch:
        patch.setattr(RUN_BATCH, interrupted)
        code, out, error = ask("sweep", "cut.toml", "--workers", "1")
    assert (code, out) == (130, "")
    assert error.startswith(
        f"zsim: {sum(tried)} of 14 runs are in cut.sqlite; the same command goes on\n"
    )
    swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))
    assert sum(tried) == 14


class Gone(InProcess):
    """Its workers are dead before the second batch."""

    def __init__(self) -> None:
        self.batches = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        if self.batches:
            raise BrokenExecutor("gone")
        self.batches += 1
        return super().submit(fn, *args, **kwargs)


def test_a_sweep_whose_workers_die_fails_and_says_how_to_go_on(
    ask: Ask, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def gone(*_: object) -> Generator[WorkerPool]:
        yield WorkerPool(executor=Gone(), workers=1)

    monkeypatch.setattr("zsim_study.answer.sweep_result.worker_pool", gone)
    code, out, error = ask("sweep", "cut.toml")
    assert (code, out, error.count("\n")) == (3, "", 1)
    assert error.startswith(
        f"zsim: a worker died: BrokenExecutor: gone; {sum(tried)} of 14 runs are in cut.sqlite; "
        "the same command goes on"
    )


MISTAKES: dict[tuple[str, ...], str] = {
    ("sweep", "abacus"): "study: 'abacus' must be a file, or a name that zsim list studies prints",
    ("sweep", "cut.toml", "--workers", "0"): "'0' must be a whole number, at least 1",
    ("sweep", "cut.toml", "--store", "."): "--store: .: must be a regular file",
    ("sweep", "cut.toml", "--store", "cut.toml"): "--store: cut.toml: file is not a database",
    (
        "sweep",
        "cut.toml",
        "--workers",
        "2",
        "--scheduler",
        "x",
    ): "--workers: 2 cannot be combined with",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_wrong_call_is_one_line(ask: Ask, words: tuple[str, ...]) -> None:
    code, out, error = ask(*words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert MISTAKES[words] in error


CONFIG = """{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256,
"n_positions": 128}"""


def test_files_that_a_study_names_lie_beside_it(ask: Ask) -> None:
    folder = Path("elsewhere")
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG, "utf-8")
    text = STUDY.replace('"tiny"', '"../small.toml"')
    (folder / "beside.toml").write_text(text, "utf-8")
    scenario = zsim_scenarios.text("tiny").partition("[model]")[0]
    rest = zsim_scenarios.text("tiny").partition("[cluster]")[2]
    model = '[model]\nhf_config = "elsewhere/config.json"\nsequence_length = 64\n[cluster]'
    Path("small.toml").write_text(f"{scenario}{model}{rest}", "utf-8")
    assert swept(ask("sweep", "elsewhere/beside.toml", "--dry-run", "--json"))["runs"] == 16
    tables = 'model = { hf_config = "config.json", sequence_length = 64 }\n'
    tables += 'cluster = { topology = "dgx_a100_infiniband" }\nzero = { stage = 1 }\n'
    tables += "train = { micro_batch_size = 1, gradient_accumulation_steps = 1 }\n"
    axis = '[[axis]]\nfield = "cluster.nodes"\nvalues = [1, 2]\n'
    alone = f'question = "?"\n[base]\n{tables}{axis}'
    (folder / "alone.toml").write_text(alone, "utf-8")
    # 1 sequence x 8 ranks is held, which 16 ranks cannot share.
    code, _, error = ask("sweep", "elsewhere/alone.toml")
    assert code == 2
    assert "nodes=2: train.global_batch_size: 8, held fixed, must be a multiple of the 16" in error
    (folder / "config.json").unlink()
    code, _, error = ask("sweep", "elsewhere/alone.toml")
    assert (code, error.count("\n")) == (2, 1)
    assert "model.hf_config: 'config.json': no such file" in error


def test_a_base_that_is_missing_is_named(ask: Ask) -> None:
    Path("cut.toml").write_text(STUDY.replace('"tiny"', '"tinny"'), "utf-8")
    code, _, error = ask("sweep", "cut.toml")
    assert code == 2
    assert error.startswith("zsim: cut.toml: base.scenario: 'tinny': did you mean tiny? It ")


@pytest.mark.one_commit_in(6)
def test_a_row_that_cannot_be_read_is_run_again(ask: Ask, tried: list[int]) -> None:
    swept(ask("sweep", "cut.toml", "--workers", "1", "--json"))
    with sqlite3.connect("cut.sqlite") as connection:
        connection.execute("UPDATE zsim_runs SET outcome = '{}' WHERE name LIKE 'stage=1%'")
    connection.close()
    tried.clear()
    code, _, error = ask("sweep", "cut.toml", "--workers", "1", "--json")
    assert (code, error) == (
        0,
        "zsim: cut.sqlite: 6 rows are not what was written; they run again\n",
    )
    assert sum(tried) == 6  # of stage 1


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_rate_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress("nics", unit="runs") as told:
        for done in (2, 5, 10):
            told(done, 10)
    shown = screen.getvalue()
    assert "10/10" in shown
    assert "runs/s" in shown
    assert ":00" in shown
