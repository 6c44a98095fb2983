"""One budget for every command: what is too large is refused in one line, before any work."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_answers import Ask, without_notice
from oversize import COMMANDS, INPUTS, MEMORY_BYTES, oversize

import zsim
from zsim.cli.option import Code
from zsim.limits import TimeLimitError, limits

ZSIM = Path(sys.executable).parent / "zsim"


WHY = {
    "fifo": "is a pipe, must be a regular file",
    "zeros": "is a device, must be a regular file",
    "sparse": "has 5 GB, must have at most",
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", WHY)
def test_a_file_that_is_not_regular_or_too_large_is_refused(
    ask: Ask, tmp_path: Path, command: str, kind: str
) -> None:
    words = oversize(kind, command, tmp_path)
    code, out, error = ask(*words)
    assert (code, out) == (Code.MISTAKE, "")
    assert error.count("\n") == 1
    assert WHY[kind] in error


@pytest.mark.parametrize("words", ["run tiny", "compare tiny --but zero.stage=1"])
def test_simulated_operations_are_bounded_in_every_command(ask: Ask, words: str) -> None:
    code, out, error = ask(*words.split(), "--set", "train.steps=50000")
    assert (code, out) == (Code.MISTAKE, "")
    assert "steps: 50000 steps of " in error
    assert error.endswith(" operations must be at most 2,000,000 in all\n")


def test_a_run_of_a_study_that_is_too_large_is_not_begun(ask: Ask, tmp_path: Path) -> None:
    study = tmp_path / "steps.toml"
    study.write_text(
        'question = "How many?"\n[base]\nscenario = "tiny"\n'
        '[[axis]]\nfield = "train.steps"\nvalues = [1, 100000]\n[goal]\nminimize = "step_time"\n',
        "utf-8",
    )
    words = ["sweep", study, "--workers", "1", "--store", tmp_path / "runs.sqlite"]
    code, out, _ = ask(*words)
    assert code == Code.DONE
    assert "steps: 100000 steps of " in out
    assert "must be at most 2,000,000 in all" in " ".join(out.split())


def test_a_larger_budget_can_be_asked_for_and_a_smaller_one(ask: Ask) -> None:
    code, _, error = ask("--limit", "operations=10", "run", "tiny")
    assert (code, "must be at most 10 in all" in error) == (Code.MISTAKE, True)
    assert ask("--limit", "operations=1e8", "run", "tiny", "--steps", "2")[0] == Code.DONE
    assert limits() == limits().__class__()  # nothing is left of it


@pytest.mark.parametrize(
    ("setting", "why"),
    {
        "memori=1 GB": "--limit: 'memori': did you mean memory? It must be one of operations, ",
        "time=soon": "--limit: time: 'soon' is not a quantity such as '2.5 us'",
        "time=-1": "--limit: time: '-1' must be more than 0 and less than 1e18",
        "operations=inf": "--limit: operations: 'inf' must be a whole number",
        "memory=1": "--limit: memory: '1' is not a quantity such as '32 GB'",
    }.items(),
)
def test_a_limit_that_is_none_is_told(ask: Ask, setting: str, why: str) -> None:
    code, out, error = ask("--limit", setting, "run", "tiny")
    assert (code, out) == (Code.MISTAKE, "")
    assert error.startswith(f"zsim: {why}")


# Hypothesis has a callback of the collector; where the limit is raised in it, Python says so.
LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@LOST
def test_a_command_that_takes_too_long_ends_by_itself(ask: Ask) -> None:
    code, out, error = ask("--limit", "time=0.5", "check", "llama2_7b", "--set", "model.layers=900")
    assert (code, out) == (Code.FAILED, "")
    assert error.startswith("zsim: time: it took longer than 0.5 s")


class Finalized:
    """Takes a while to finalize, in which nothing can be raised."""

    def __del__(self) -> None:
        time.sleep(0.5)


@LOST
def test_a_limit_on_time_that_is_lost_in_a_finalizer_is_raised_again() -> None:
    seen: list[str] = []

    def finalize_and_go_on() -> None:
        Finalized()
        seen.append("the finalizer has lost it")
        time.sleep(30)

    with pytest.raises(TimeLimitError), zsim.limited(time_s=0.1):
        finalize_and_go_on()
    assert seen


def test_what_tidies_up_after_a_limit_on_time_is_not_disturbed() -> None:
    tidied: list[str] = []

    def wait_and_tidy_up() -> None:
        try:
            time.sleep(30)
        finally:
            time.sleep(0.4)
            tidied.append("all")

    with pytest.raises(TimeLimitError), zsim.limited(time_s=0.1):
        wait_and_tidy_up()
    assert tidied


@LOST
def test_limits_hold_from_python() -> None:
    with zsim.limited(operations=10), pytest.raises(zsim.MistakeError, match="at most 10 in all"):
        zsim.run("tiny")
    with (
        zsim.limited(time_s=0.3),
        pytest.raises(TimeLimitError, match=r"time: it took longer than 0\.3 s"),
    ):
        zsim.check("llama2_7b", {"model.layers": 900})
    with zsim.limited(config_bytes=100), pytest.raises(zsim.MistakeError, match="at most 100 B"):
        zsim.load(__file__)
    with pytest.raises(ValueError, match="limit ranks: 0 must be more than 0"):
        zsim.limited(ranks=0).__enter__()


def test_memory_is_bounded_from_python_and_free_again_afterwards() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    with zsim.limited(memory_bytes=used + 2**26), pytest.raises(MemoryError):
        bytearray(2**28)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert bytearray(2**28)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("megabytes", [10, 40, 75])
def test_memory_that_runs_out_is_one_line_and_exit_code_3(megabytes: int) -> None:
    """Native libraries take memory of their own, by the number and kind of cores."""
    words = ["--limit", f"memory={megabytes} MB", "check", "llama2_7b", "--set", "model.layers=100"]
    done = subprocess.run([ZSIM, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (Code.FAILED, "")
    assert without_notice(done.stderr) == (
        "zsim: out of memory: the command needs more than there is, or than --limit memory allows\n"
    )


@pytest.mark.one_commit_in(9)
def test_a_sweep_whose_runs_find_no_memory_says_so_of_each_and_ends(tmp_path: Path) -> None:
    words = ["--limit", "run-memory=75 MB", "sweep", "nics"]
    done = subprocess.run(
        [ZSIM, *words, "--store", tmp_path / "nics.sqlite"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (Code.NO, "")
    assert "5 failed" in done.stdout
    assert "out of memory: the run needs more than a worker may have" in " ".join(
        done.stdout.split()
    )


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_every_oversize_input_in_one_line(
    command: str, tmp_path: Path
) -> None:
    """Under 1 GiB of address space: exit code 2 or 3, one line, 10 s of this process's time."""

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    told: list[str] = []
    for kind in INPUTS:
        folder = tmp_path / kind
        folder.mkdir()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [ZSIM, *map(str, oversize(kind, command, folder))],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=bounded,
            timeout=120,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        told.append(f"{command} {kind}: {done.returncode} {spent_s:.1f} s {done.stderr.strip()}")
        lines = without_notice(done.stderr).count("\n")
        if done.returncode not in {2, 3} or lines != 1 or spent_s > 10:
            told[-1] = f"WRONG: {told[-1]}"
    sys.stdout.write("\n".join(told))
    assert not [line for line in told if line.startswith("WRONG")], "\n".join(told)
