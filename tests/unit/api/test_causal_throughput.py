"""Utilization counts masked attention as publications do; the causal figure is printed with it."""

import re
import tomllib
from functools import cache

from zsim.api.launch import run
from zsim.api.run_result import RunResult
from zsim.api.scenario import load
from zsim.files.source import shipped_text
from zsim_study.answer.sweep_result import sweep

ONE_NODE: dict[str, object] = {"cluster.nodes": 1, "model.layers": 2, "train.steps": 1}
PUBLISHED_RATES: dict[str, object] = {
    "train.precision": "fp32",
    "compute.profile": None,
    "network.profile": None,
}


@cache
def ran(sequence: int, *, by_rates: bool = False) -> RunResult:
    changes = ONE_NODE | {"model.sequence_length": sequence}
    changes |= PUBLISHED_RATES if by_rates else {}
    return run(load("llama2_7b", changes), check=False)


def causal_line(result: RunResult) -> list[str]:
    return [line for name, line in result.facts() if name == "causal throughput"]


def test_a_long_sequence_has_a_line_without_masked_attention() -> None:
    result = ran(65536)
    (line,) = causal_line(result)
    found = result.summary.causal
    assert f"(MFU {found.mfu:.1%}, HFU {found.hfu:.1%})" in line
    assert line.endswith("; the line above counts masked attention too")
    assert not causal_line(ran(4096))


def test_utilization_above_the_peak_is_neither_capped_nor_left_alone() -> None:
    result = ran(65536, by_rates=True)
    assert result.mfu > 1
    (throughput,) = [line for name, line in result.facts() if name == "throughput"]
    assert f"MFU {result.mfu:.1%}" in throughput
    assert 0 < result.summary.causal.mfu < 1
    assert f"MFU {result.summary.causal.mfu:.1%}" in causal_line(result)[0]


def test_a_sweep_prints_no_utilization_above_the_peak_alone() -> None:
    found = ran(65536, by_rates=True).summary
    assert found.mfu_text == f"{found.mfu:.1%} (causal {found.causal.mfu:.1%})"
    tables = tomllib.loads(shipped_text("llama2_7b"))
    del tables["title"], tables["compute"], tables["network"]
    tables["model"] |= {"layers": 2, "sequence_length": 65536}
    tables["cluster"] |= {"nodes": 1}
    tables["train"] |= {"precision": "fp32", "steps": 1}
    axis = {"name": "stage", "field": "zero.stage", "values": [3]}
    (line,) = [
        each
        for each in sweep({"question": "Which?", "base": tables, "axis": [axis]}).text().split("\n")
        if "causal" in each
    ]
    assert re.search(r" 1\d\d\.\d% \(causal \d\d\.\d%\) ", line)


def test_a_utilization_below_the_peak_stands_alone() -> None:
    found = ran(4096).summary
    assert found.mfu_text == f"{found.mfu:.1%}"
