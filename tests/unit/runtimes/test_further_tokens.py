"""Blocks for further tokens with tensor ranks: proofs, parameters, work and volume."""

from collections import Counter
from dataclasses import replace

import pytest
from faults.findings import families
from faults.schedules import edited
from fitting import fitting
from small_mixtures import EXPERTS, FOLDED, SHAPE, strategy_of

from zsim.model.experts import Experts
from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import CollectiveOperation, walk
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron

MEGATRON = Zero(stage=1, emulate=Megatron(sequence_parallel=True))


def model_of(strategy: Strategy, experts: Experts | None = None, layers: int = 1) -> Model:
    shape = replace(
        SHAPE, execution=strategy.execution, experts=experts, mtp_layers=layers, layers=2
    )
    made = fitting(shape, strategy)
    return in_blocks(made) if strategy.parallel.pipeline > 1 else made


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "experts"),
    [
        (strategy_of(data=2, tensor=2), None),
        (strategy_of(data=2, tensor=2, pipeline=2), None),
        (strategy_of(MEGATRON, Checkpointing.FULL, Precision.FP16, data=2, tensor=4), None),
        (strategy_of(Zero(stage=3, sequence_parallel=True), data=2, tensor=2), None),
        (strategy_of(**FOLDED), replace(EXPERTS, score_bias=True, shared_intermediate_size=4)),
    ],
)
def test_blocks_for_further_tokens_are_proved_with_tensor_ranks(
    strategy: Strategy, experts: Experts | None, layers: int
) -> None:
    strategy = strategy.but({"train.clip_norm": 1.0})
    shape = replace(SHAPE, attention_heads=4, intermediate_size=8)
    made = fitting(
        replace(shape, execution=strategy.execution, experts=experts, mtp_layers=layers), strategy
    )
    model = in_blocks(made) if strategy.parallel.pipeline > 1 else made
    assert check(make_schedule(model, strategy), model) == ()


def test_tensor_ranks_share_parameters_and_work_of_these_blocks() -> None:
    alone, two = strategy_of(data=2), strategy_of(data=2, tensor=2)
    whole, part = model_of(alone, layers=2), model_of(two, layers=2)
    assert whole.parameter_count == part.parameter_count
    assert (whole.forward_flops, whole.backward_flops) == (part.forward_flops, part.backward_flops)
    cut = {each.name for each in part.parameters if each.tensor_sharded}
    assert {"mtp0.projection.weight", "mtp1.projection.weight"} <= cut


def test_a_block_sums_its_embedding_its_projection_and_its_loss_over_tensor_ranks() -> None:
    strategy = strategy_of(data=2, tensor=2)
    schedule = make_schedule(model_of(strategy), strategy)
    found = Counter(
        type(each).__name__
        for each in walk(schedule.programs[0].step)
        if isinstance(each, CollectiveOperation)
        and each.id.startswith("step/forward/mb0/mtp0")
        and each.group == "tensor"
    )
    # embedding, projection, attention and MLP; inputs of the last three and of the logits
    assert found == {"ReduceScatter": 4, "AllGather": 4, "AllReduce": 1}


@pytest.mark.parametrize("kind", ["ReduceScatter", "AllGather", "AllReduce"])
def test_a_collective_of_such_a_block_that_is_left_out_is_found(kind: str) -> None:
    strategy = strategy_of(data=2, tensor=2)
    model = model_of(strategy)
    schedule = make_schedule(model, strategy)
    (name, *_) = [
        each.id
        for each in walk(schedule.programs[0].step)
        if type(each).__name__ == kind and each.id.startswith("step/forward/mb1/mtp0")
    ]
    assert "values" in families(
        edited(schedule, lambda each: () if each.id == name else (each,)), model
    )


def test_runtimes_whose_ranks_hold_whole_embeddings_refuse_these_blocks() -> None:
    options = FSDP2(enable_sequence_parallel=True, replicate_embedding=True)
    strategy = strategy_of(Zero(stage=3, emulate=options), data=2, tensor=2)
    with pytest.raises(ModelError, match=r"model\.mtp_layers: not modelled with tensor 2 for this"):
        model_of(strategy)
