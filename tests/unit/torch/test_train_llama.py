"""The example that trains a small Llama: it learns, and goes on from its checkpoint bit for bit."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from zsim_torch.supervise.ranks import RankPool

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.one_commit_in(24)
def test_the_example_learns_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    example, text = import_module("train_llama"), EXAMPLES.parent / "LICENSE"
    words = [str(text), "--steps", "12", "--folder", str(tmp_path / "half")]
    half = subprocess.run(
        [sys.executable, EXAMPLES / "train_llama.py", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    with RankPool(2) as pool:  # of its own: they import the example from the path of now
        rest = pool.run(example.fit, text, tmp_path / "half", 24)[0]
        whole = pool.run(example.fit, text, tmp_path / "whole", 24)[0]
    assert [line.split(", gradient")[0] for line in half.stdout.splitlines()] == [
        f"step {step}: loss {whole[step - 1]:.3f}" for step in (10, 12)
    ]
    assert rest == whole[12:]
    assert len(rest) == 12
    assert whole[-1] < 0.7 * whole[0]
