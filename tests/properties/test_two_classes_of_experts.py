"""A busiest rank of every expert group: its class and one other stand for all ranks."""

from typing import Any

import pytest
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st
from pipeline_tables import pipeline_tables

import zsim
from zsim.backend.backend import Job
from zsim_des.simulation import SimBackend


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a mixture of experts with a busiest rank in each expert group."""
    stages, tensor = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    data = draw(st.sampled_from([8, 16]))
    tables = pipeline_tables(
        "megatron",
        stages=stages,
        tensor=tensor,
        data=data,
        micro_batches=draw(st.integers(1, 4)),
        stage=draw(st.sampled_from([0, 1])),
        steps=draw(st.integers(1, 2)),
        options={"sequence_parallel": tensor > 1},
        clip_norm=draw(st.sampled_from([None, 1.0])),
    )
    tables["model"] = {"name": "qwen3-30b-a3b", "layers": 2 * stages}
    tables["parallel"] |= {"expert": draw(st.sampled_from([2, 4, 8])), "expert_tensor": 1}
    tables["experts"] = {"busiest": draw(st.sampled_from([1.1, 1.3, 1.7]))}
    tables["activations"] = {"checkpointing": draw(st.sampled_from(["none", "full"]))}
    return tables


def job_of(tables: dict[str, Any]) -> Job:
    return zsim.load(tables).job


@examples(12)
@given(mixtures())
def test_two_classes_take_as_long_as_all_ranks(tables: dict[str, Any]) -> None:
    """All ranks take within 0.5 % of the time of the busiest rank and one other of each stage."""
    job = job_of(tables)
    found, whole = SimBackend(), SimBackend(unfold=True)
    few, all_of_them = found.step_ends_ps(job), whole.step_ends_ps(job)
    assert few == pytest.approx(all_of_them, rel=0.005)


@examples(6)
@given(mixtures())
def test_two_classes_reserve_the_memory_of_all_ranks(tables: dict[str, Any]) -> None:
    job = job_of(tables)
    few, every = (each.run(job, seed=0) for each in (SimBackend(), SimBackend(unfold=True)))
    by_role = {rank.role: rank for rank in every.ranks}
    assert sum(rank.stands_for for rank in few.ranks) == len(every.ranks)
    for rank in few.ranks:
        assert rank.reservations == by_role[rank.role].reservations


def test_a_stage_has_the_busiest_rank_and_one_other() -> None:
    tables = pipeline_tables("megatron", stages=2, micro_batches=4, data=16, tensor=2)
    tables["model"] = {"name": "qwen3-30b-a3b", "layers": 4}
    tables["zero"]["megatron"] = {"sequence_parallel": True}
    tables["parallel"] |= {"expert": 8, "expert_tensor": 1}
    tables["experts"] = {"busiest": 1.3}
    ranks = SimBackend().run(job_of(tables), seed=0).ranks
    # 32 ranks of a stage are 4 groups of 8 expert ranks
    assert [(rank.role, rank.stands_for) for rank in ranks] == [
        ("stage0/0", 4),
        ("stage0/1", 28),
        ("stage1/0", 4),
        ("stage1/1", 28),
    ]
