"""The section of a page on experts: their rows, who waits for whom, and where rows are sent."""

from dataclasses import replace

import pytest

import zsim
from zsim.backend.backend import Job
from zsim.report.experts_section import experts
from zsim.report.page import Section
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


def test_a_model_without_expert_ranks_has_no_section() -> None:
    job = zsim.load("tiny_llama").job
    assert experts(job, SimBackend().run(job, seed=0)) is None
