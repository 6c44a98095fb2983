"""`zsim validate trust`: coverage of what ships, and the table of judged runs made again."""

import csv
import json
from pathlib import Path

import pytest

from zsim.api.judged_figures import figure_runs
from zsim.cli.main import answer
from zsim.prediction.evidence import judged_runs, parse

INTERNEVO = {
    "model": "InternLM 7B (configs/7B_sft.py)",
    "gpu": "A100-SXM4-80GB",
    "seq_len_tokens": 2048,
    "step_time_s_derived": 4.5,
    "n_gpus": 16,
    "tp": 1,
    "zero1_group": -1,
    "activation_checkpoint": "False",
    "micro_batch_seqs": 1,
    "grad_accum": 1,
    "peak_gpu_memory_GB": "",
    "source": "nobody 2026",
}


def test_what_ships_is_judged_with_each_sweep_and_each_publication_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["validate", "trust", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == len(judged_runs())
    assert found["stale"] is None
    assert [(each["quantity"], each["left_out"]) for each in found["coverage"]] == [
        ("step time", "sweep"),
        ("step time", "publication"),
        ("peak memory", "sweep"),
        ("peak memory", "publication"),
    ]
    for each in found["coverage"]:
        assert sum(kind["stated"] for kind in each["kinds"]) == each["all"]["stated"]
    assert answer(["validate", "trust"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{len(judged_runs()):,} judged runs of ")
    assert max(map(len, lines)) <= 100
    legend = " ".join(lines[-5:])
    assert all(word in legend for word in ("stated: ", "covered: ", "observed: ", "a run stalls "))


def test_the_table_is_made_again_from_published_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "internevo_zero1_a100.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(INTERNEVO))
        writer.writeheader()
        writer.writerow(INTERNEVO)
    path = tmp_path / "table.json"
    words = ["validate", "trust", "--data", str(tmp_path), "--to", str(path), "--json"]
    assert answer(words) == 0
    found = json.loads(capsys.readouterr().out)
    papers = {citation for citation, *_ in figure_runs()}
    kept = sum(run.citation in papers for run in judged_runs())  # as they ship
    assert kept > 0
    assert found["runs"] == kept + 1
    assert (found["stale"], found["new"]) == (len(judged_runs()) - kept, 1)
    run = parse(path.read_text("utf-8"))[0]
    assert (run.publication, run.citation, run.step_s) == ("InternEvo", "nobody 2026", 4.5)
    assert run.features.nodes == 2
    assert run.peak_error is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trust", "--to", "x.json"], "--to: x.json: is for trust with --data"),
        (["memory", "--data", ".", "--to", "x.json"], "--to: x.json: is for trust with --data"),
        (
            ["trust", "--picture", "x.svg"],
            "--picture: x.svg: is for training, memory, paper and pipelines",
        ),
    ],
)
def test_options_that_trust_does_not_take_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["validate", *words]) == 2
    assert capsys.readouterr().err == f"zsim: {message}\n"
