"""The section of a page on experts: their rows, who waits for whom, and where rows are sent."""

from dataclasses import replace

import numpy as np
import pytest

import zsim
from zsim.backend.backend import Job
from zsim.report.experts_section import experts
from zsim.report.page import Section
from zsim.report.svg.dispatch_drawing import draw
from zsim.report.svg.figure import BarRows
from zsim.trace.trace import Trace
from zsim_des import SimBackend

CHANGES: dict[str, object] = {
    "model.experts": {"count": 8, "top_k": 2, "intermediate_size": 64},
    "parallel.expert": 4,
    "zero.stage": 1,
    "train.steps": 1,
}
SENT = 2 * 3 * 2 * 64 * 2
"""Rows of a rank: micro-batches, layers, sequences, tokens and choices."""


def simulated(**changes: object) -> tuple[Job, Trace]:
    """Return a job with four expert ranks, and its trace."""
    job = zsim.load("tiny_llama", {**CHANGES, **changes}).job
    return job, SimBackend().run(job, seed=0)


def section_of(job: Job, trace: Trace) -> Section:
    """Return the section on experts, which is there."""
    found = experts(job, trace)
    assert found is not None
    return found


def bars_of(section: Section) -> list[float]:
    """Return the ends of the bars of a section."""
    assert isinstance(section.figure, BarRows)
    return [bars[0].end for _, bars in section.figure.rows]


def column(section: Section, name: str) -> list[float]:
    """Return the numbers in a column of a section's table."""
    assert section.table is not None
    place = section.table.columns.index(name)
    return [float(row[place].value) for row in section.table.rows]


GATHERS = {
    "zero.emulate": "megatron",
    "zero.bucket_elements": 500_000_000,
    "zero.megatron.moe_token_dispatcher_type": "allgather",
}


@pytest.mark.parametrize("changes", [{}, GATHERS])
def test_others_wait_for_the_busiest_rank_and_not_it_for_them(changes: dict[str, object]) -> None:
    section = section_of(*simulated(**{"experts.busiest": 1.5, **changes}))
    rows, waits = column(section, "received"), column(section, "waits")
    assert sum(rows) == sum(bars_of(section)) == 4 * SENT
    assert rows[0] == 1.5 * SENT
    assert waits[0] == 0 < waits[1]
    assert column(section, "last to arrive")[0] > 0 == column(section, "last to arrive")[1]
    assert "Rank 0 receives 1.50 x the mean" in section.sentences[0]


def test_all_rows_of_a_rank_go_to_itself_its_node_or_other_nodes() -> None:
    near = section_of(*simulated())
    two_nodes = {"parallel.data": 16, "parallel.expert": 16, "cluster.nodes": 2}
    experts_of_16 = {"count": 16, "top_k": 2, "intermediate_size": 64}
    far = section_of(*simulated(**two_nodes, **{"model.experts": experts_of_16}))
    for section in (near, far):
        places = (column(section, name) for name in ("to itself", "in its node", "to others"))
        assert {sum(each) for each in zip(*places, strict=True)} == {SENT}
    assert set(column(near, "to others")) == {0.0}
    assert set(column(far, "to others")) == {SENT / 2}


def test_a_real_run_shows_the_rows_that_it_read_in_the_last_step() -> None:
    job, trace = simulated()
    first, *others = trace.ranks
    rows = (
        (0, 1, 2, 0, 3, 5, 7),
        (0, 0, 0, 0, 1, 5, 4),
        (0, 0, 0, 1, 1, 5, 9),
        (1, 0, 0, 0, 1, 5, 8),
    )
    section = section_of(job, replace(trace, ranks=(replace(first, rows=rows), *others)))
    assert bars_of(section) == [0, 0, 0, 0, 0, 11, 0, 0]


def test_of_many_experts_neighbors_share_a_bar() -> None:
    table = {"count": 128, "top_k": 2, "intermediate_size": 16}
    section = section_of(*simulated(**{"model.experts": table}))
    assert len(bars_of(section)) == 64
    assert sum(bars_of(section)) == 4 * SENT


def test_of_a_pipeline_each_stage_shows_its_first_group() -> None:
    pipeline: dict[str, object] = {
        "model.layers": 4,
        "parallel.pipeline": 2,
        "parallel.data": 4,
        "zero": {"stage": 1, "emulate": "megatron"},
        "experts.busiest": 1.5,
    }
    section = section_of(*simulated(**pipeline))
    assert section.table is not None
    names = [row[0].text for row in section.table.rows]
    assert names == [f"rank {rank}, stage{rank // 4}" for rank in range(8)]
    rows, waits = column(section, "received"), column(section, "waits")
    assert rows[0] == rows[4] == 1.5 * SENT * 2 / 3  # two of four layers, not three
    assert waits[0] == waits[4] == 0 < min(waits[1], waits[5])
    assert sum(bars_of(section)) == sum(rows) == 2 * 4 * SENT * 2 / 3
    assert "the first group of each stage" in section.sentences[0]
    assert section.sentences[1:] == ("Of ranks that are alike, one shows its waits.",)


def test_a_real_pipeline_shows_the_rows_of_its_groups() -> None:
    changes: dict[str, object] = {
        "model.layers": 4,
        "parallel.pipeline": 2,
        "parallel.data": 8,
        "zero": {"stage": 1, "emulate": "megatron"},
    }
    job, trace = simulated(**changes)
    first, *others = trace.ranks
    # step, micro-batch, layer, group, source, expert and rows; two groups in each stage
    rows = (
        (0, 0, 0, 0, 1, 5, 4),
        (0, 0, 0, 1, 1, 5, 90),
        (0, 1, 2, 2, 3, 1, 7),
        (0, 0, 3, 3, 0, 0, 80),
    )
    section = section_of(job, replace(trace, ranks=(replace(first, rows=rows), *others)))
    assert bars_of(section) == [0, 7, 0, 0, 0, 4, 0, 0]
    assert column(section, "received") == [0, 0, 4, 0, 7, 0, 0, 0]


def test_padded_rows_are_those_of_a_layer() -> None:
    table = {
        "count": 8,
        "top_k": 2,
        "intermediate_size": 64,
        "capacity_factor": 1.25,
        "pads_to_capacity": True,
    }
    section = section_of(*simulated(**{"model.experts": table}))
    assert set(bars_of(section)) == {4 * 2 * 64 * 2 * 1.25 / 8}  # ranks and their capacity
    assert "in one layer and micro-batch" in section.sentences[0]


def test_the_picture_shows_how_many_rows_each_rank_sends_to_each() -> None:
    section = section_of(*simulated(**{"experts.busiest": 1.75}))
    picture = section.picture
    assert picture is not None
    assert picture.count("<title>") == 16
    assert f"rank 3 to rank 0: {1.75 * SENT / 4:,.0f} rows" in picture
    assert f"rank 0 to rank 3: {0.75 * SENT / 4:,.0f} rows" in picture


def test_of_many_ranks_neighbours_share_a_cell() -> None:
    blocks = np.ones((130, 130), np.int64)
    picture = draw(blocks, range(130), 8)
    assert picture.count("<title>") == 44**2
    assert "rank 0 to rank 0: 9 rows" in picture
    assert "rank 129 to rank 129: 1 rows" in picture


def test_a_model_without_expert_ranks_has_no_section() -> None:
    job = zsim.load("tiny_llama").job
    assert experts(job, SimBackend().run(job, seed=0)) is None
