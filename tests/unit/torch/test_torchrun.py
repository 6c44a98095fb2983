import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIO = """
title = "two ranks"
[model]
layers = 1
hidden_size = 8
attention_heads = 1
sequence_length = 8
vocab_size = 256
[cluster]
topology = "dgx_a100_infiniband"
nodes = 1
[zero]
stage = 2
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
precision = "fp32"
optimizer = "sgd"
steps = 2
"""

FAILING = """
import os, pathlib, signal, sys, time
from torch import distributed, ones
from zsim.backend.backend import RunFailedError
from zsim_torch import run_ranks
from zsim_torch.supervise.progress_record import note

SEEN = pathlib.Path(os.environ["TMPDIR"], "seen")

def fail():
    if distributed.get_rank() == 1:
        note("an error")
        match sys.argv[1]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                time.sleep(3)  # long enough to have told
                os.kill(os.getpid(), signal.SIGSTOP)
            case _:
                while not SEEN.exists():
                    time.sleep(0.01)
                raise ValueError("mine")
    note("a sum")
    SEEN.touch()
    distributed.all_reduce(ones(1))

for ranks in (3, 2):
    try:
        run_ranks(fail, ranks=ranks, timeout_s=5 if sys.argv[1] == "stop" else 60)
    except ValueError as error:
        sys.stderr.write(f"{error}\\n")
    except RunFailedError as error:
        sys.stderr.write(f"{error}\\n")
        sys.exit(3)
"""


def torchrun(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node=2", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.one_commit_in(24)
def test_the_command_joins_the_ranks_that_torchrun_started_and_the_first_one_speaks(
    tmp_path: Path,
) -> None:
    scenario = tmp_path / "two.toml"
    scenario.write_text(SCENARIO)
    zsim = Path(sys.executable).with_name("zsim")
    done = torchrun(
        "--no-python", zsim, "run", scenario, "--backend", "torch", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["backend"] == "torch"
    assert len(answer["losses"]) == 2
    assert answer["losses"][1] < answer["losses"][0]


@pytest.mark.one_commit_in(24)
def test_under_torchrun_a_failure_is_told_by_the_rank_that_failed_and_then_by_the_others(
    tmp_path: Path,
) -> None:
    """Rank 0 sees its peer go; torchrun ends it, and it says where it was."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = torchrun(script, "raise", cwd=tmp_path)
    assert done.returncode != 0
    assert "ranks: 3 are asked for, torchrun started 2" in done.stderr
    own = done.stderr.index("rank 1: ValueError: mine (details: ")
    assert done.stderr.index("zsim: rank 0: ended by SIGTERM, last seen: a sum") > own


@pytest.mark.long
def test_under_torchrun_those_that_survive_a_killed_rank_say_where_they_were(
    tmp_path: Path,
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = torchrun(script, "kill", cwd=tmp_path)
    assert done.returncode != 0
    assert "zsim: rank 0: ended by SIGTERM, last seen: a sum\n" in done.stderr


@pytest.mark.long
def test_under_torchrun_those_that_wait_for_a_stopped_rank_name_it(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = torchrun(script, "stop", cwd=tmp_path)
    assert done.returncode != 0
    found = re.search(r"zsim: (rank 1: .*) \(details: (\S+)\)\n", done.stderr)
    assert found is not None, done.stderr
    assert found[1] == "rank 1: it tells no more, no progress for 5 s, last seen: an error"
    assert "told by rank 0" in Path(found[2]).read_text("utf-8")
