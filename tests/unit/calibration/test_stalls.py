"""Runs that stall are told by what was published of runs like them, and errors without them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.api.training_validation import verdict_object, verdicts_text
from zsim.calibration.published import Published
from zsim.calibration.stalls import Turn, stalled
from zsim.calibration.training_tables import TABLES
from zsim.calibration.training_verdict import Quantity, RunForecast, verdict

TABLE = TABLES["zero01_tp_pp_training_runs"]

SECONDS = st.integers(1, 100).map(float)


def turns(*of_nodes: tuple[int, float], alike: str = "a") -> list[tuple[int, Turn]]:
    """Turns of runs that are alike, with their lines from 2 on."""
    return [
        (line, Turn(alike=alike, nodes=nodes, seconds=seconds))
        for line, (nodes, seconds) in enumerate(of_nodes, start=2)
    ]


def test_a_run_stalls_that_takes_more_than_twice_what_it_does_on_other_nodes() -> None:
    assert stalled(turns((1, 1.0), (4, 2.0), (8, 2.1))) == {4}
    # Two on as many nodes say nothing of each other.
    assert stalled(turns((4, 1.0), (4, 9.0))) == frozenset()
    assert stalled([*turns((1, 1.0)), *turns((4, 9.0), alike="b")]) == frozenset()


@given(st.lists(st.tuples(st.integers(1, 4), SECONDS), max_size=8), st.integers(0, 7))
def test_the_shortest_never_stalls_and_a_longer_one_does_wherever_a_shorter_one_does(
    runs: Sequence[tuple[int, float]], which: int
) -> None:
    found = stalled(turns(*runs))
    if runs:
        shortest = min(range(len(runs)), key=lambda place: runs[place][1])
        assert shortest + 2 not in found
    if which < len(runs):
        nodes, seconds = runs[which]
        longer = [*runs[:which], (nodes, 3 * seconds), *runs[which + 1 :]]
        if which + 2 in found:
            assert which + 2 in stalled(turns(*longer))


ROW = {
    "model_size": "1B",
    "n_layers_inferred": "2",
    "d_model_inferred": "256",
    "n_heads_inferred": "16",
    "n_kv_heads_inferred": "16",
    "ffn_inferred": "512",
    "vocab_inferred": "1024",
    "embeddings_inferred": "untied",
    "gpu": "H100 80GB",
    "seq_len_tokens": "4096",
    "micro_batch_seqs": "1",
    "global_batch_seqs": "64",
    "pp": "2",
    "tp": "2",
    "zero_stage": "1",
    "status": "FOUND",
    "peak_gpu_memory_GB": "1.5",
    "source": "a table",
}


def runs_of(*cells: tuple[int, float]) -> list[Published]:
    """Rows of so many data ranks and seconds, of one model and its degrees."""
    rows = [
        ROW | {"dp": str(data), "grad_accum": str(64 // data), "step_time_s_derived": str(seconds)}
        for data, seconds in cells
    ]
    return TABLE.read(rows)


def taking(seconds: float) -> RunForecast:
    return RunForecast(
        step_time_s=seconds,
        peak_allocated_bytes=1,
        peak_reserved_bytes=1,
        usable_bytes=2,
        fits=True,
    )


def test_a_step_is_compared_by_the_turns_that_it_has() -> None:
    # 32 and one turns on one node, 16 and one on two, 2 and one on 16: 0.1 s each, or 0.3.
    runs = runs_of((2, 3.3), (4, 1.7), (32, 0.9))
    assert [run.stalls for run in runs] == [False, False, True]
    assert [run.extent for run in runs] == [
        "pp > 1, up to 4 nodes",
        "pp > 1, up to 4 nodes",
        "pp > 1, more than 4 nodes",
    ]


def test_errors_are_told_with_and_without_runs_that_stall_and_their_lines_before() -> None:
    runs = runs_of((2, 3.3), (4, 1.7), (32, 0.9))
    assert all(run.judged for run in runs)
    said = verdict("a table", Quantity.STEP_TIME, runs, [taking(3.3), taking(3.4), taking(0.3)])
    assert said.stalled == (4,)
    assert said.steady is not None
    assert said.steady.rows == 2
    assert said.by_part["pp > 1"].rows == 3
    assert said.steady_by_part["pp > 1, up to 4 nodes"].mean == pytest.approx(0.5)
    assert "pp > 1, more than 4 nodes" not in said.steady_by_part
    lines = verdicts_text([said]).splitlines()
    assert lines[0].startswith("a table: 1 rows stall: ")
    assert lines[1] == "  lines 4"
    assert any("of these, not stalled" in line for line in lines)
    assert verdict_object(said)["stalled_rows"] == [4]
    memory = verdict("a table", Quantity.MEMORY, runs, [taking(1.0)] * 3)
    assert (memory.stalled, memory.steady) == ((), None)
    assert "stalled_rows" not in verdict_object(memory)
