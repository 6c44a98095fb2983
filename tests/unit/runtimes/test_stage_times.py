"""The least time of a pipeline is that of the formulas of its papers, if messages take no time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim_runtimes.megatron.order import Interleaved, one_forward_one_backward
from zsim_runtimes.megatron.pipeline import issue_order
from zsim_runtimes.stage_actions import Direction, Messages, StagePlace, Task
from zsim_runtimes.stage_times import least_s


def places(stages: int, chunks: int = 1) -> list[StagePlace]:
    return [StagePlace(index=index, stages=stages, chunks=chunks) for index in range(stages)]


def no_message(_stage: int, _chunk: int, _is_forward: bool) -> float:
    return 0.0


@given(stages=st.integers(1, 6), more=st.integers(0, 6), forward=st.floats(0.1, 2.0))
def test_stages_of_one_chunk_are_idle_for_one_task_of_each_other_stage(
    *, stages: int, more: int, forward: float
) -> None:
    """Narayanan et al. 2021, section 2.2.1: (p - 1) (f + b) of m (f + b)."""
    own, count = places(stages), stages + more
    found = least_s(
        own,
        [list(one_forward_one_backward(each, count)) for each in own],
        lambda _stage, _chunk, is_forward: forward if is_forward else 1.0,
        no_message,
    )
    assert found == pytest.approx((count + stages - 1) * (forward + 1.0))


@given(
    stages=st.integers(2, 5),
    chunks=st.integers(2, 4),
    rounds=st.integers(1, 3),
    overlaps=st.booleans(),
)
def test_stages_of_several_chunks_are_idle_for_one_of_several_parts_of_that_time(
    *, stages: int, chunks: int, rounds: int, overlaps: bool
) -> None:
    """Section 2.2.2: a v-th of it, if each of v chunks takes a v-th of the time."""
    own, count = places(stages, chunks), rounds * stages
    found = least_s(
        own,
        [
            list(Interleaved(each, count, overlaps=overlaps).actions(gathers=False, reduces=False))
            for each in own
        ],
        lambda _stage, _chunk, is_forward: (1.0 if is_forward else 2.0) / chunks,
        no_message,
        issued=issue_order if overlaps else None,
    )
    assert found == pytest.approx(3.0 * (count + (stages - 1) / chunks))


def test_a_stage_waits_for_a_message_on_its_compute_stream() -> None:
    sender, receiver = places(2)
    forward = Task(Direction.FORWARD, 0, 0)
    found = least_s(
        [sender, receiver],
        [
            [forward, Messages(sends=(forward,)), forward],
            [Messages(receives=(forward,)), forward],
        ],
        lambda stage, _chunk, _is_forward: 1.0 + stage,
        lambda _stage, _chunk, _is_forward: 0.5,
    )
    assert found == 1.0 + 0.5 + 2.0
