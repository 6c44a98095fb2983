"""A pipeline step whose micro-batches are folded has the figures of the one written out."""

from dataclasses import asdict
from typing import Any

import pytest
from drawn_examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from pipeline_tables import pipeline_tables

import zsim
from zsim_plan.answer.setting_trial import tried

MEGATRON: dict[str, st.SearchStrategy[object]] = {
    "overlap_grad_reduce": st.booleans(),
}


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a pipeline of Megatron-LM or nanotron with enough micro-batches to be folded."""
    runtime = draw(st.sampled_from(["megatron", "megatron", "nanotron"]))
    stages, chunks = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]))
    stage = 1 if runtime == "nanotron" else draw(st.sampled_from([0, 1]))
    options: dict[str, object] = {}
    if runtime == "nanotron":
        chunks = 1
    else:
        options = draw(st.fixed_dictionaries(MEGATRON))
        gathers = stage == 1 and options["overlap_grad_reduce"] and draw(st.booleans())
        options["overlap_param_gather"] = gathers
    layers = stages * chunks * draw(st.integers(1, 2))
    if chunks > 1:
        options["num_virtual_stages_per_pipeline_rank"] = chunks
        options["overlap_p2p_comm"] = stages == 2 or draw(st.booleans())
    least = 2 * (3 * stages if chunks > 1 else stages + 4 + stages)
    micro_batches = least + (stages if chunks > 1 else 1) * draw(st.integers(0, 4))
    return pipeline_tables(
        runtime,
        stages=stages,
        micro_batches=micro_batches,
        layers=layers,
        tensor=draw(st.sampled_from([1, 1, 2])),
        data=draw(st.sampled_from([1, 2])),
        stage=stage,
        options=options,
        clip_norm=draw(st.sampled_from([None, 1.0])),
        steps=draw(st.integers(1, 3)),
    )


@examples(12)
@given(pipelines())
def test_a_folded_step_has_every_figure_of_the_step_written_out(tables: dict[str, Any]) -> None:
    folded = zsim.run(tables, check=False)
    assume(folded.folded is not None)
    whole = zsim.run(tables, check=False, folds=False)
    assert asdict(folded.summary) == asdict(whole.summary)
    assert folded.step_time_band_s == whole.step_time_band_s


@examples(12)
@given(pipelines(), st.integers(0, 12))
def test_a_trial_of_a_search_has_the_figures_of_the_run(tables: dict[str, Any], fewer: int) -> None:
    train, turn = tables["train"], tables["parallel"]["pipeline"]
    count = train["gradient_accumulation_steps"]
    train["gradient_accumulation_steps"] = max(turn, count - turn * fewer)
    found, ran = tried(tables), zsim.run(tables, check=False)
    figures = ran.summary
    assert not found.refusal
    assert found.step_time_s == figures.step_time_s
    assert found.memory_bytes == figures.peak_reserved_bytes
    assert found.fits is figures.fits is True
    assert found.error_text == ran.error


@pytest.mark.parametrize(
    "tables",
    [
        pipeline_tables("nanotron", stages=4, micro_batches=24),
        pipeline_tables("megatron", stages=4, micro_batches=20),
        pipeline_tables(
            "megatron",
            stages=2,
            micro_batches=12,
            tensor=2,
            options={
                "num_virtual_stages_per_pipeline_rank": 2,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
        ),
    ],
    ids=["nanotron", "megatron", "megatron, interleaved"],
)
def test_usual_pipelines_are_folded(tables: dict[str, Any]) -> None:
    folded = zsim.run(tables, check=False)
    assert folded.folded is not None
    assert asdict(folded.summary) == asdict(zsim.run(tables, check=False, folds=False).summary)


@pytest.mark.parametrize("busiest", [1.0, 1.3])
def test_pipelines_of_experts_are_folded(busiest: float) -> None:
    tables = pipeline_tables("megatron", stages=2, micro_batches=10, data=8)
    tables["model"] = {"name": "qwen3-30b-a3b", "layers": 4}
    tables["parallel"] |= {"expert": 4, "expert_tensor": 1}
    tables["experts"] = {"busiest": busiest}
    folded = zsim.run(tables, check=False)
    assert folded.folded is not None
    assert asdict(folded.summary) == asdict(zsim.run(tables, check=False, folds=False).summary)
