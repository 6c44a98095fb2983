"""Latent attention on ranks of a tensor axis: each compresses its tokens and expands its heads."""

from dataclasses import replace

import pytest

from zsim.model.architecture import Llama
from zsim.model.experts import Latent
from zsim.model.model import Model, ModelError
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron

LATENT = Latent(key_value_rank=16, query_rank=24, nope_size=8, rope_size=4, value_size=8)
TOKENS = 32


def shape(latent: Latent = LATENT) -> Llama:
    return Llama(
        layers=2,
        hidden_size=64,
        attention_heads=4,
        sequence_length=TOKENS,
        vocab_size=128,
        intermediate_size=128,
        latent=latent,
    )


def model(ranks: int, *, sequence: bool, latent: Latent = LATENT) -> Model:
    return transformer(shape(latent), micro_batch_size=1, tensor=ranks, sequence=sequence)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("query_rank", [24, None])
def test_ranks_hold_parts_of_the_layers_that_expand_and_copies_of_the_others(
    query_rank: int | None, *, sequence: bool
) -> None:
    latent = Latent(
        key_value_rank=16, query_rank=query_rank, nope_size=8, rope_size=4, value_size=8
    )
    whole = {each.name: each for each in model(1, sequence=False, latent=latent).parameters}
    for each in model(2, sequence=sequence, latent=latent).parameters:
        assert each.elements * (1 + each.tensor_sharded) == whole[each.name].elements
    sharded = {
        each.name.removeprefix("block0.")
        for each in model(2, sequence=sequence, latent=latent).parameters
        if each.name.startswith("block0.") and each.tensor_sharded
    }
    queries = "q_b.weight" if query_rank else "q.weight"
    assert {queries, "kv_b.weight", "proj.weight"} <= sharded
    assert not {name for name in sharded if name.startswith(("q_a", "kv_a", "ln_"))}


def test_ranks_gather_compressed_tokens_and_not_the_hidden_state() -> None:
    cut = model(2, sequence=True)
    (block,) = (unit for unit in cut.units if unit.name == "block0")
    read = next(each for each in block.segments if each.reads_gathered)
    gathered = [cut.values[name] for name in read.inputs]
    assert sum(each.elements for each in gathered) == TOKENS // 2 * (24 + 16 + 4)
    assert all(each.tensor_sharded for each in gathered)


def test_all_ranks_together_have_the_products_of_one() -> None:
    def flops(ranks: int) -> int:
        return ranks * sum(
            kernel.flops
            for unit in model(ranks, sequence=True).units
            for segment in unit.segments
            for kernel in (*segment.forward, *segment.backward)
            if kernel.kind.multiplies_matrices
        )

    assert flops(4) == flops(2) == flops(1)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("query_rank", [24, None])
def test_a_step_of_latent_attention_on_tensor_ranks_is_proved(
    query_rank: int | None, *, sequence: bool
) -> None:
    latent = Latent(
        key_value_rank=16, query_rank=query_rank, nope_size=8, rope_size=4, value_size=8
    )
    strategy = Strategy(
        parallel=Parallel(data=2, tensor=2),
        zero=Zero(stage=1, emulate=Megatron(sequence_parallel=sequence)),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=Train(gradient_accumulation_steps=2),
    )
    built = transformer(
        shape(latent),
        micro_batch_size=1,
        tensor=2,
        sequence=sequence,
        precision=strategy.train.precision,
    )
    assert check(make_schedule(built, strategy), built) == ()


@pytest.mark.parametrize(
    "runtime",
    [
        Megatron(sequence_parallel=True, async_tensor_model_parallel_allreduce=True),
        Megatron(sequence_parallel=True, tp_comm_overlap=True),
    ],
    ids=["nccl", "userbuffers"],
)
@pytest.mark.parametrize("query_rank", [24, None])
def test_other_layers_of_latent_attention_overlap_collectives(
    query_rank: int | None, runtime: Megatron
) -> None:
    latent = replace(LATENT, query_rank=query_rank)
    strategy = Strategy(
        parallel=Parallel(data=2, tensor=2),
        zero=Zero(stage=1, emulate=runtime),
        train=Train(gradient_accumulation_steps=2),
    )
    built = transformer(
        replace(shape(latent), execution=strategy.execution),
        micro_batch_size=1,
        tensor=2,
        sequence=True,
        precision=strategy.train.precision,
    )
    assert check(make_schedule(built, strategy), built) == ()
    fused = {
        segment.parameters[0]
        for unit in built.units
        for segment in unit.segments
        if any(kernel.part for kernel in (*segment.forward, *segment.backward))
    }
    assert "block0.gate.weight" in fused


def test_a_runtime_that_compresses_all_tokens_is_refused() -> None:
    execution = Strategy(zero=Zero(stage=3, emulate=FSDP2())).execution
    with pytest.raises(ModelError, match="latent: not modelled with tensor 2 for this runtime"):
        transformer(replace(shape(), execution=execution), micro_batch_size=1, tensor=2)
