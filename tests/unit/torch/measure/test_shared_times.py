"""Times that several ranks have together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim_record.measure.collective_times import CollectiveSample, shared_s
from zsim_record.measure.machine import SeveralNodesError, measure_machine

TAKEN_S = 2.0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=9))
def test_a_collective_takes_as_long_however_late_a_rank_comes(
    late: list[tuple[float, float]],
) -> None:
    begins = [100.0 * number + max(each) for number, each in enumerate(late)]
    samples = [
        CollectiveSample(
            collective="all_gather",
            size_bytes=64,
            issue_s=0.1,
            handed_s=tuple(100.0 * number + each[rank] for number, each in enumerate(late)),
            ended_s=tuple(begin + TAKEN_S - rank for begin in begins),
        )
        for rank in (0, 1)
    ]
    assert shared_s(samples) == pytest.approx(TAKEN_S)


def test_ranks_on_several_nodes_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**started, "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SeveralNodesError, match="ranks: torchrun started 2 of 4 here"):
        measure_machine(ranks=None, seconds=1.0)
