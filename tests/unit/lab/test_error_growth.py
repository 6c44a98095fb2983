"""Errors are compared between numbers of GPUs, setting by setting."""

from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.error_growth import growth
from zsim_lab.verdict.verdict import VerdictRow

AZURE = {
    "model_label": "175B",
    "seq_length": "512",
    "n_gpus_A100_80GB": "128",
    "microbatch_per_gpu": "1",
    "throughput_TFLOPS_per_gpu": "50.0",
    "provenance": "nobody",
}


def run(gpus: int, batch: int) -> Published:
    table = TABLES["paper_azure_zero3_a100_throughput"]
    cells = {**AZURE, "n_gpus_A100_80GB": str(gpus), "microbatch_per_gpu": str(batch)}
    (found,) = table.read([cells])
    assert not found.reason
    return found


def predicted(run: Published, off: float) -> VerdictRow:
    return VerdictRow(place=2, name="", published=1.0, predicted=1.0 + off, source=run)


ERRORS = st.dictionaries(st.sampled_from([1, 2, 4]), st.floats(-0.5, 0.5), min_size=1)


@given(ERRORS, ERRORS)
def test_growth_is_the_difference_of_errors_of_each_setting_that_is_on_both(
    few: dict[int, float], many: dict[int, float]
) -> None:
    found = growth(
        [predicted(run(128, batch), off) for batch, off in few.items()]
        + [predicted(run(512, batch), off) for batch, off in many.items()]
    )
    differences = sorted(many[batch] - few[batch] for batch in few.keys() & many.keys())
    if not differences:
        assert found is None
        return
    assert found is not None
    said = cast("dict[str, float]", found.value)
    assert (said["settings"], said["fewest_gpus"], said["most_gpus"]) == (
        len(differences),
        128,
        512,
    )
    assert any(said["furthest"] == pytest.approx(differences[end]) for end in (0, -1))
    below = sum(each < said["median"] - 1e-9 for each in differences)
    above = sum(each > said["median"] + 1e-9 for each in differences)
    assert below == above or len(differences) > below + above


def test_states_cut_in_another_way_are_another_setting() -> None:
    inside = run(128, 1)
    parallel = {"tensor": 1, "data": 8, "replicate": 64}
    outside = replace(run(512, 1), scenario={**inside.scenario, "parallel": parallel})
    assert growth([predicted(inside, 0.1), predicted(outside, 0.2)]) is None


def test_tables_to_which_nothing_is_fitted_judge_with_every_row() -> None:
    judging = {name for name, table in TABLES.items() if table.judges}
    assert judging == {
        "paper_azure_zero3_a100_throughput",
        "internevo_zero1_a100",
        "zero_fsdp_runs_misc",
        "vtrain_a100_multi",
        "dense_megatron_goldens",
        "memory_peaks",
    }
