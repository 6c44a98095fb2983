"""Every benchmark runs to its end, once and small: what it measures still exists."""

import multiprocessing
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from zsim_torch.supervise.ranks import run_ranks

FOLDER = Path(__file__).parents[3] / "benchmarks"

Lines = Callable[..., list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Run `main` of a benchmark with other constants; return the lines that it prints."""

    def printed(name: str, *arguments: object, **constants: object) -> list[str]:
        module: Any = import_module(f"benchmarks.{name}")
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main(*(each for each in arguments if isinstance(each, int)))
        return capsys.readouterr().out.splitlines()

    return printed


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the 96 layers of several benchmarks two, in this process."""
    monkeypatch.setattr("benchmarks.step_96_layers.LAYERS", 2)


def test_a_step_of_equal_layers(lines: Lines) -> None:
    found = lines("step_96_layers", 16, REPETITIONS=1)
    assert found[-1].startswith("findings     0, exposed ")


@pytest.mark.one_commit_in(6)
def test_proofs(lines: Lines) -> None:
    case = (2, 2, 8, 1.0)
    constants = {"LAYERS": {2: (64, 4)}, "CASES": (case,), "DEEPSPEED": case, "UNFOLDED": case}
    found = lines("check", REPETITIONS=1, **constants)
    proved = [line for line in found if not line.startswith("    ")]
    assert len(proved) == 3
    assert all(line.endswith(", 0 findings") for line in proved)


def test_the_cost_of_many_gpus_and_what_if_questions(lines: Lines) -> None:
    layers = import_module("benchmarks.step_96_layers").model()
    found = lines(
        "scale",
        LAYERS=layers,
        TARGETS_S={64: 1.0},
        UNFOLDED_GPUS=32,
        WHAT_IFS=8,
        WHAT_IF_GPUS=(64,),
        REPETITIONS=1,
    )
    assert [line.split()[0] for line in found] == ["96", "64", "peak", "32", *["what-ifs"] * 2]


def test_a_trillion_parameters_on_drives(lines: Lines) -> None:
    small = {"cluster.nodes": 1, "model.layers": 2, "model.hidden_size": 1024}
    *_, together = lines("trillion", ROUNDS=0, CHANGES=small)
    assert together.startswith("together ")


@pytest.mark.one_commit_in(21)
def test_runs_of_a_study_on_two_workers(lines: Lines) -> None:
    other = multiprocessing.get_context("forkserver").Process(target=signal.pause)
    other.start()  # as the ranks of other tests of this process
    try:
        *runs, memory = lines("study", 36, SPEEDS=1)
    finally:
        other.kill()
        other.join()
    assert [line.split(" runs")[0] for line in runs] == ["36"] * 3
    assert memory.count(" + ") == 2  # this process, and both workers


def test_requests_of_the_allocator(lines: Lines) -> None:
    found = lines("allocator", STEPS=1, LAYERS=2, DRAWN=200, REPETITIONS=1)
    assert len(found) == 4


def test_the_page_of_a_study(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = lines("page", 36)
    assert found[-1] == "how fast it opens: no chromium here"


@pytest.mark.one_commit_in(9)
def test_pipelines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline: Any = import_module("benchmarks.pipeline")
    fork = multiprocessing.get_context("fork")  # which has the constants that are changed here
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setattr(pipeline, "CASES", (pipeline.Case("megatron", 2, 2, 2),))
    pipeline.main()
    made, clocked = capfd.readouterr().out.splitlines()
    assert made.endswith(", 0 findings")
    assert clocked.startswith("  by the clock, on ")


@pytest.mark.one_commit_in(18)
def test_the_search_for_the_best_setting(lines: Lines) -> None:
    narrow = {"zero.emulate": "fsdp2", "zero.stage": 3, "model.layers": 2}
    few = {"SEARCH_OPERATIONS": 10_000, "WORKERS": 1}
    found = lines("best", MODEL="gpt2", GPUS="1xh100", CHANGES=narrow, **few)
    assert found[0].startswith("gpt2 on 1xh100: ")


@pytest.mark.one_commit_in(18)
def test_the_quality_of_answers(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = {"zero.emulate": "fsdp2", "zero.stage": 3, "model.layers": 1, "parallel.tensor": 1}
    few: dict[str, object] = {"SEEDS": (2,), "OPERATIONS": 10_000, "NEAR_LONG": -1.0, "WORKERS": 1}
    questions = (("gpt2", "1xh100", narrow),)
    found = lines("best_quality", "exhaustive", "long", QUESTIONS=questions, **few)
    assert found[0].startswith("space 2: ")
    assert found[1].endswith(": True")
    assert "; +0.00% to 4 times the operations" in found[2]


def test_reads_and_writes_beside_adam(lines: Lines, tmp_path: Path) -> None:
    found = lines("offload", tmp_path, ELEMENTS=1000, GROUPS=4, ROUNDS=1, STEPS=2)
    assert found[-1].startswith("phase over larger ")


# ZeroRedundancyOptimizer compiles functions with it.
@pytest.mark.one_commit_in(12)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_real_steps_beside_those_of_pytorch() -> None:
    real = import_module("benchmarks.real")
    times, host = run_ranks(of_both, ranks=2)[0]
    assert real.ratios(times).startswith("ZeroRedundancyOptimizer ")
    assert len(str(host).split()) == 6


def of_both() -> tuple[Any, Any]:
    """Compare a stage, and measure the host, on one start of ranks."""
    real: Any = import_module("benchmarks.real")
    real.WARM_UP, real.ROUNDS, real.STEPS, real.HOST_STEPS = 1, 1, 1, 1
    return real.compared(real.Size(1, 8), 1), real.host_time(1)


def test_predicted_steps_beside_real_ones(lines: Lines, tmp_path: Path) -> None:
    size = import_module("benchmarks.predicted").Size(
        name="small", layers=1, hidden_size=16, sequence_length=8
    )
    found = lines("predicted", "dgx_a100", SIZES=(size,), STAGES=(1,), STEPS=3)
    assert found[1].startswith("small, stage 1 ")


def test_every_benchmark_is_run_here() -> None:
    text = Path(__file__).read_text("utf-8")
    missing = [each.stem for each in FOLDER.glob("*.py") if f'"{each.stem}"' not in text]
    assert [name for name in missing if f"benchmarks.{name}" not in text] == []
