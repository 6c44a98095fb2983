"""Stages of Megatron-LM's pipeline with unlike numbers of layers: how many, trained and proved."""

from dataclasses import replace
from itertools import accumulate

import pytest
from exact_training import proves_and_trains
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_pipelines import OVERLAPPED, SHAPE, model_of, strategy_of

from zsim.analysis.schedule_plan import plan
from zsim.config_error import ConfigError
from zsim.model.model import ModelError
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.layer_split import LayerSplit, stages_in
from zsim_runtimes.megatron.options import Megatron

BOTH = Megatron(
    account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
)
ENDS = Megatron(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1)


@pytest.mark.parametrize(
    ("split", "layers", "stages", "sizes"),
    [
        # BLOOM's 70 layers over 12 stages, whose embedding and head count for one each
        (LayerSplit(embedding=True, loss=True), 70, 12, (5, *[6] * 10, 5)),
        (LayerSplit(first=7, last=5), 60, 8, (7, *[8] * 6, 5)),
        (LayerSplit(last=1), 78, 12, (*[7] * 11, 1)),
        (LayerSplit(first=3), 7, 3, (3, 2, 2)),
        (LayerSplit(first=3, last=2), 5, 2, (3, 2)),
        (LayerSplit(first=2, last=4, chunks=2), 14, 4, (1, 2, 2, 2, 1, 2, 2, 2)),
        (LayerSplit(embedding=True, loss=True, layers_of_chunk=2), 14, 4, (1, *[2] * 6, 1)),
        (LayerSplit(embedding=True, loss=True, chunks=2), 2, 2, (0, 1, 1, 0)),
        (LayerSplit(layout="Et|(tt|)*2,L"), 5, 4, (1, 2, 2, 0)),
        (LayerSplit(layout="E|t*3|(t|)*1tL"), 5, 2, (0, 3, 1, 1)),
    ],
)
def test_layers_are_dealt_out_as_said(
    split: LayerSplit, layers: int, stages: int, sizes: tuple[int, ...]
) -> None:
    assert split.sizes(layers, stages) == sizes


@pytest.mark.one_commit_in(6)
@settings(max_examples=300)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 4)),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_chunk_begins_where_megatron_says_its_layers_do(
    stages: int,
    chunks: int,
    each: int,
    embedding: bool,
    loss: bool,
    first: int | None,
    last: int | None,
) -> None:
    if first is not None or last is not None:
        embedding = loss = False
    first, last = (None if end is None else end * chunks for end in (first, last))
    between = stages - (first is not None) - (last is not None)
    layers = between * each * chunks + (first or 0) + (last or 0) - embedding - loss
    assume(layers > 0)
    split = LayerSplit(first=first, last=last, embedding=embedding, loss=loss, chunks=chunks)
    sizes = split.sizes(layers, stages)
    assert sum(sizes) == layers
    begins = [0, *accumulate(sizes)]
    for chunk in range(chunks):
        for stage in range(stages):
            # get_transformer_layer_offset (transformer/transformer_layer.py), which counts before a
            # chunk all chunks before it of all stages, and of its own the stages before it
            all_before = (layers + embedding + loss) // chunks * chunk
            middle = stage - (first is not None)
            ends = 0 if stage == 0 or first is None else first // chunks
            offset = all_before + ends + max(middle, 0) * each
            if embedding and (chunk or stage):
                offset -= 1
            assert begins[chunk * stages + stage] == offset


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_what_is_repeated_in_a_layout_is_written_out(parts: list[tuple[int, int]]) -> None:
    text = "E" + "".join(f",(t*{layers}|)*{times}" for layers, times in parts) + "L"
    sizes = [layers for layers, times in parts for _ in range(times)]
    assert [each.count("t") for each in stages_in(text)] == [*sizes, 0]


UNLIKE = {
    "first and last": strategy_of(4, 5, ENDS),
    "both counted, overlapped": strategy_of(
        3,
        4,
        OVERLAPPED.but(
            account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
        ),
    ).but({"parallel.data": 2}),
    "tokens cut": strategy_of(
        2, 3, Megatron(num_layers_in_first_pipeline_stage=3, sequence_parallel=True)
    ).but(
        {
            "parallel.data": 2,
            "parallel.tensor": 2,
            "train.precision": Precision.FP16,
            "activations.checkpointing": Checkpointing.FULL,
        }
    ),
    "embedding and loss alone": strategy_of(
        4, 3, Megatron(pipeline_model_parallel_layout="E|ttt|t|L")
    ).but({"parallel.replicate": 2}),
    "chunks of first and last": strategy_of(
        3,
        3,
        Megatron(
            num_layers_in_first_pipeline_stage=2,
            num_layers_in_last_pipeline_stage=2,
            num_virtual_stages_per_pipeline_rank=2,
            overlap_p2p_comm=False,
        ),
    ),
    "chunks counted": strategy_of(
        2,
        4,
        OVERLAPPED.but(
            account_for_embedding_in_pipeline_split=True,
            account_for_loss_in_pipeline_split=True,
            num_layers_per_virtual_pipeline_stage=1,
        ),
    ).but({"parallel.data": 2}),
    "chunks laid out": strategy_of(
        2, 2, Megatron(pipeline_model_parallel_layout="Et|ttt|tt|L")
    ).but({"zero.stage": 0, "train.precision": Precision.FP32}),
}
LAYERS = {"chunks of first and last": 8, "chunks counted": 2, "chunks laid out": 6}


@pytest.mark.matrix(24)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", UNLIKE)
def test_stages_of_unlike_layers_train_what_one_process_does_and_are_proved(
    name: str, tied: bool
) -> None:
    strategy = UNLIKE[name]
    shape = replace(SHAPE, layers=LAYERS.get(name, 4), tied_embeddings=tied)
    model = model_of(strategy, shape)
    proves_and_trains(make_schedule(model, strategy), model, strategy)


def test_a_plan_shows_the_units_of_every_stage() -> None:
    strategy = strategy_of(3, 2, Megatron(num_layers_in_last_pipeline_stage=2))
    model = model_of(strategy, replace(SHAPE, layers=4))
    found = plan(make_schedule(model, strategy), model)
    assert [each.units for each in found.stages] == [
        ("embedding", "block0"),
        ("block1",),
        ("block2", "block3", "head"),
    ]


@pytest.mark.parametrize(
    ("strategy", "layers", "why"),
    [
        (strategy_of(3, 2, BOTH), 5, r"layers: 5 and 2 for embedding and loss must be .* = 3$"),
        (
            strategy_of(2, 2, Megatron(account_for_loss_in_pipeline_split=True)),
            4,
            "4 and 1 for loss must",
        ),
        (
            strategy_of(4, 2, ENDS),
            5,
            r"layers: 5 less 1 of the first stage and 1 of the last stage is 3, must be a multiple "
            r"of the 2 other stages$",
        ),
        (strategy_of(2, 2, ENDS), 4, r"is 2, must be 0$"),
        (
            strategy_of(2, 2, Megatron(num_layers_in_first_pipeline_stage=4)),
            4,
            "is 0, must be a multiple of the 1 other",
        ),
        (
            strategy_of(4, 4, ENDS.but(num_virtual_stages_per_pipeline_rank=2)),
            6,
            r"per_pipeline_rank: 2 must divide the 1 layers of a stage",
        ),
        (
            strategy_of(2, 2, Megatron(num_virtual_stages_per_pipeline_rank=3)),
            8,
            r"= 2 x 3 virtual stages$",
        ),
        (
            strategy_of(2, 2, Megatron(pipeline_model_parallel_layout="Et|tt|tL")),
            4,
            r"layout: 3 stages must be a multiple of parallel\.pipeline = 2",
        ),
        (
            strategy_of(2, 2, Megatron(pipeline_model_parallel_layout="Et|ttL")),
            4,
            r"its 3 layers must be model\.layers = 4",
        ),
        (
            strategy_of(2, 2, Megatron(pipeline_model_parallel_layout="tE|tL")),
            2,
            "must begin with E and end with L",
        ),
        (
            strategy_of(2, 2, Megatron(pipeline_model_parallel_layout="EtL|tL")),
            2,
            "must have one E and one L",
        ),
        (
            strategy_of(3, 2, Megatron(pipeline_model_parallel_layout="Ett||L")),
            2,
            "stage 1 of 3 has nothing",
        ),
        (strategy_of(1, 2, ENDS), 4, r"first_pipeline_stage: 1 needs parallel\.pipeline > 1"),
        (strategy_of(1, 2, BOTH), 4, r"pipeline_split: true needs parallel\.pipeline > 1"),
    ],
)
def test_layers_that_cannot_be_dealt_out_are_refused(
    strategy: Strategy, layers: int, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        make_schedule(model_of(strategy, replace(SHAPE, layers=layers)), strategy)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {
                "num_layers_in_first_pipeline_stage": 1,
                "account_for_loss_in_pipeline_split": True,
            },
            "num_layers_in_first_pipeline_stage: contradicts account_for_loss",
        ),
        (
            {
                "num_layers_in_last_pipeline_stage": 1,
                "num_layers_per_virtual_pipeline_stage": 1,
            },
            "num_layers_per_virtual_pipeline_stage: contradicts num_layers_in_last",
        ),
        (
            {
                "num_virtual_stages_per_pipeline_rank": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
            },
            "contradicts num_virtual_stages_per_pipeline_rank",
        ),
        (
            {
                "pipeline_model_parallel_layout": "Et|tL",
                "num_layers_in_last_pipeline_stage": 1,
            },
            "pipeline_model_parallel_layout: contradicts num_layers_in_last",
        ),
        ({"pipeline_model_parallel_layout": "Et|x|L"}, "'x' must be E, t, L,"),
        ({"pipeline_model_parallel_layout": "Et|mL"}, "heads of several tokens are not modelled"),
        ({"pipeline_model_parallel_layout": "Et*99999999999|L"}, "at most 10,000"),
        ({"pipeline_model_parallel_layout": "E(t*99|)*999L"}, "at most 10,000"),
    ],
)
def test_splits_that_contradict_each_other_are_refused(
    options: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        Megatron().but(**options)
