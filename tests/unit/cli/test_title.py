"""The title of a run says what the command line changed in its scenario."""

import json
from pathlib import Path

import pytest
from command_answers import Ask

TINY = "Tiny: a GPT of 3 layers, to try on a laptop"
NODES = ("--set", "cluster.nodes=64")
LLAMA = "Llama 2 7B: ZeRO stage 3 on 512 H100, with cluster.nodes = 64"


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("words", "title"),
    [
        ((), TINY),
        (
            ("--set", "model.layers=5"),
            f"{TINY.replace('3 layers', '5 layers')}, with model.layers = 5",
        ),
        (
            ("--set", "zero.stage=2", "--set", "train.precision=bf16"),
            f"{TINY}, with zero.stage = 2, train.precision = bf16",
        ),
        (("--set", "zero.stage=1", "--set", "zero.stage=2"), f"{TINY}, with zero.stage = 2"),
        (("--set", ' zero . stage = "2"'), ""),
        (("--set", "model.layers=3"), TINY),  # as it is in the file
        (("--set", "title=Mine"), "Mine"),
        (("--set", "title=Mine", "--set", "zero.stage=2"), "Mine, with zero.stage = 2"),
    ],
)
def test_a_title_names_every_key_that_is_changed(
    ask: Ask, words: tuple[str, ...], title: str
) -> None:
    code, out, _ = ask("plan", "tiny", *words)
    assert out.partition("\n")[0] == title
    assert code == (0 if title else 2)


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    ("command", "memory"), [("run --no-check", "10 GB"), ("plan", "10 GB"), ("largest", "4 GB")]
)
def test_lines_and_json_have_the_title_of_what_ran(ask: Ask, command: str, memory: str) -> None:
    name, *options = command.split()
    words = (name, "llama2_7b", *options, *NODES, "--set", f"cluster.gpu_memory={memory}")
    title = f"{LLAMA}, cluster.gpu_memory = {memory}"
    assert ask(*words)[1].startswith(f"{title}\n")
    assert json.loads(ask(*words, "--json")[1])["title"] == title


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("name", "words", "title"),
    [
        ("llama2_7b", "--set zero.stage=2", "Llama 2 7B: ZeRO stage 2 on 32 H100, "),
        (
            "gpt3_175b",
            "--set cluster.topology=dgx_a100_infiniband",
            "GPT-3 175B: ZeRO stage 3 on 512 A100",
        ),
        (
            "zero_table1",
            "--set model.parameters=1e12",
            "ZeRO Table 1: 1 trillion parameters, stage 2,",
        ),
        ("tiny", '--set title="{zero.stage}{no.key}{"', "3{no.key}{"),
    ],
)
def test_a_title_follows_what_is_run(ask: Ask, name: str, words: str, title: str) -> None:
    code, out, _ = ask("plan", name, *words.split())
    assert (code, out.startswith(title)) == (0, True), out.partition("\n")[0]


@pytest.mark.one_commit_in(6)
def test_the_ranks_of_the_command_line_are_in_the_title(ask: Ask) -> None:
    assert ask("plan", "llama2_7b", "--json")[1]
    _, out, _ = ask("run", "llama2_7b", "--ranks", "16", "--no-check")
    assert out.startswith("Llama 2 7B: ZeRO stage 3 on 16 H100, with ranks = 16\n")


def test_the_page_of_a_run_has_the_title_of_what_ran(ask: Ask, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert ask("run", "tiny", "--set", "zero.stage=2", "--report", page)[0] == 0
    assert f"<title>{TINY}, with zero.stage = 2</title>" in page.read_text("utf-8")


def test_ranks_and_steps_of_the_command_line_are_in_the_title(ask: Ask) -> None:
    _, out, _ = ask("run", "tiny", "--ranks", "8", "--steps", "3")
    assert out.startswith(f"{TINY}, with train.steps = 3, ranks = 8\n")


def test_runs_that_are_compared_are_called_by_what_both_were_set_to(ask: Ask) -> None:
    words = ("compare", "tiny", "--set", "train.steps=2", "--but", "zero.stage=2")
    first, second, *_ = ask(*words)[1].splitlines()
    assert first == "A: tiny with train.steps=2 (sim)"
    assert second == "B: tiny with train.steps=2, zero.stage=2 (sim)"
