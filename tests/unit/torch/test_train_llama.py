"""The example that trains a small Llama: it learns, and goes on from its checkpoint bit for bit."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from zsim_torch.supervise.ranks import RankPool

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_learns_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    example, text = import_module("train_llama"), EXAMPLES.parent / "LICENSE"
    half = example.main([str(text), "--steps", "12", "--folder", str(tmp_path / "half")])
    with RankPool(2) as pool:
        rest = pool.run(example.fit, text, tmp_path / "half", 24)[0]
        whole = pool.run(example.fit, text, tmp_path / "whole", 24)[0]
    assert half + rest == whole
    assert len(rest) == 12
    assert whole[-1] < 0.7 * whole[0]
