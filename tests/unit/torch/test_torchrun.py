import json
import os
import subprocess
import sys
from pathlib import Path

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
import sys
from torch import distributed, ones
from zsim.backend import RunFailedError
from zsim_torch import run_ranks

def fail():
    if distributed.get_rank() == 1:
        raise ValueError("mine")
    distributed.all_reduce(ones(1))

for ranks in (3, 2):
    try:
        run_ranks(fail, ranks=ranks)
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


def test_under_torchrun_a_failure_is_told_by_the_rank_that_failed(tmp_path: Path) -> None:
    """Rank 0 sees its peer go; torchrun ends it before it would say so."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = torchrun(script, cwd=tmp_path)
    assert done.returncode != 0
    assert "rank 1: ValueError: mine (details: " in done.stderr
    assert "rank 0:" not in done.stderr
    assert "ranks: 3 are asked for, torchrun started 2" in done.stderr
