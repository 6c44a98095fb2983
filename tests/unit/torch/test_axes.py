"""Tensor and pipeline axes on real ranks, with data ranks around them, train as one process does.

Sums over ranks of the tensor axis are in another order than those of one process, so values differ
by roundings; stages of a pipeline do what one process does, in its order, and to its bits.
"""

from dataclasses import replace

import pytest
import torch
from shared_ranks import SharedPools
from tiny_training import BOUND, distance
from trained_axes import (
    BESIDE_PRODUCTS,
    CUT,
    DEEP_LLAMA,
    EVERY_SECOND,
    FSDP2_OF_STAGES,
    FSDP2_OF_TOKENS,
    FULL,
    KEPT,
    MEGATRON,
    MEGATRON_OF_TOKENS,
    NANOTRON,
    OF_TOKENS,
    PARTITIONED,
    PLAIN,
    SMALL_GPT,
    SMALL_LLAMA,
    SUMMED_IN_FP32,
    TIED_GPT,
    WIDE_GPT,
    AxesCase,
    RankResult,
    by_plain_loop,
    on,
    trained_on_axes,
    whole,
)

from zsim.dtype import DType
from zsim.model.architecture import Activation, Architecture, Attention, Norm, QKNorm
from zsim.proof import against_trace as refinement
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule, Sync
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron
from zsim_torch.rank_result import merged
from zsim_torch.supervise.ranks import RankPool

FOUR_BLOCKS = replace(SMALL_GPT, layers=4)
CHUNKS = Megatron(num_layers_per_virtual_pipeline_stage=1)
LAID_OUT = Megatron(pipeline_model_parallel_layout="E|ttt|t|L")
FIRST_OF_ONE = Megatron(num_layers_in_first_pipeline_stage=1)
FSDP2_CHUNKS = FSDP2(reshard_after_forward=False, pipeline_schedule=PipelineSchedule.INTERLEAVED)
FSDP2_SPLIT = FSDP2_CHUNKS.but(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE)
MOVING = FSDP2(reshard_after_forward=False, offload_wrapper=True)
PARTS = Megatron(scatter_gather_tensors_in_pipeline=True)
HEAD_NORMS = replace(SMALL_LLAMA, joined_qkv=False, qk_norm=QKNorm.HEAD)
FUSED = on(
    FSDP2_OF_TOKENS.but({"train.compile": True}),
    tensor=2,
    emulate=FSDP2(enable_async_tensor_parallel=True),
    clip_norm=0.1,
)
"""Modules are not compiled here: what is fused is gathered, multiplied and scattered in turn."""
TWO_RANKS = {
    "stage 3, tensor 2": AxesCase(
        SMALL_LLAMA, on(PLAIN, tensor=2, stage=3, bucket_elements=200, clip_norm=0.1)
    ),
    "stage 1, tensor 2, tied, checkpoints": AxesCase(
        TIED_GPT, on(PLAIN, tensor=2, stage=1).but(FULL)
    ),
    "Megatron-LM, tensor 2": AxesCase(SMALL_GPT, on(MEGATRON, tensor=2), witness=True),
    "stage 2, tensor 2, tokens cut": AxesCase(
        TIED_GPT, on(OF_TOKENS, tensor=2, stage=2, clip_norm=0.1), poison=True
    ),
    "Megatron-LM, 2 ranks, sums in fp32": AxesCase(SMALL_GPT, SUMMED_IN_FP32, witness=True),
    "Megatron-LM, tensor 2, tokens cut": AxesCase(
        SMALL_GPT, on(MEGATRON_OF_TOKENS, tensor=2), witness=True
    ),
    **BESIDE_PRODUCTS,
    "FSDP2, tensor 2, tokens cut": AxesCase(
        SMALL_LLAMA, on(FSDP2_OF_TOKENS, tensor=2, clip_norm=0.1).but(EVERY_SECOND), witness=True
    ),
    "FSDP2, tensor 2, collectives of tokens in parts": AxesCase(
        replace(SMALL_LLAMA, execution=FUSED.execution), FUSED, witness=True
    ),
    "FSDP2, tensor 2, hidden states whole": AxesCase(
        SMALL_LLAMA, on(FSDP2_OF_TOKENS, tensor=2, emulate=FSDP2(enable_sequence_parallel=False))
    ),
    "stage 3, tensor 2, norms of heads": AxesCase(
        HEAD_NORMS, on(PLAIN, tensor=2, stage=3, clip_norm=0.1), witness=True
    ),
    "Megatron-LM, tensor 2, norms of heads": AxesCase(
        HEAD_NORMS, on(MEGATRON, tensor=2, clip_norm=0.1), witness=True
    ),
    "FSDP2, tensor 2, hidden states whole, norms of heads": AxesCase(
        replace(HEAD_NORMS, norm=Norm.LAYER),
        on(FSDP2_OF_TOKENS, tensor=2, emulate=FSDP2(enable_sequence_parallel=False)),
    ),
    "nanotron, tensor 2, tokens cut, norms of heads": AxesCase(
        HEAD_NORMS, on(NANOTRON, tensor=2, emulate=CUT)
    ),
    "FSDP2, tensor 2, whole gradients added up": AxesCase(
        SMALL_LLAMA, on(FSDP2_OF_TOKENS, tensor=2, emulate=FSDP2(gradient_sync=Sync.LAST))
    ),
    "FSDP2, 2 ranks, states in bf16": AxesCase(
        SMALL_LLAMA,
        on(
            FSDP2_OF_TOKENS.but({"train.precision": Precision.PURE_BF16}),
            data=2,
            emulate=FSDP2(reduce_dtype=DType.FP32),
            clip_norm=0.1,
        ),
        witness=True,
    ),
    "nanotron, tensor 2, tokens cut and kept whole": AxesCase(
        SMALL_GPT, on(NANOTRON, tensor=2, stage=1, emulate=KEPT, clip_norm=0.1), poison=True
    ),
    "nanotron, 2 stages": AxesCase(SMALL_GPT, on(NANOTRON, pipeline=2), witness=True),
    "nanotron, 2 stages, bf16": AxesCase(
        SMALL_LLAMA, on(NANOTRON.but({"train.precision": Precision.BF16}), pipeline=2)
    ),
    "Megatron-LM, 2 stages, tied": AxesCase(
        TIED_GPT, on(MEGATRON, pipeline=2, clip_norm=0.1), witness=True
    ),
    "Megatron-LM, 2 stages of 2 chunks": AxesCase(
        FOUR_BLOCKS, on(MEGATRON, pipeline=2, emulate=CHUNKS), witness=True
    ),
    "Megatron-LM, 2 stages of 1 and 3 blocks": AxesCase(
        FOUR_BLOCKS, on(MEGATRON, pipeline=2, emulate=FIRST_OF_ONE, clip_norm=0.1), witness=True
    ),
    "Megatron-LM, 2 stages of 2 unlike chunks": AxesCase(
        FOUR_BLOCKS, on(MEGATRON, pipeline=2, emulate=LAID_OUT), poison=True
    ),
    "FSDP2, 2 stages": AxesCase(SMALL_LLAMA, on(FSDP2_OF_STAGES, pipeline=2), poison=True),
    "FSDP2, 2 stages of 2 chunks": AxesCase(
        FOUR_BLOCKS,
        on(FSDP2_OF_STAGES, pipeline=2, emulate=FSDP2_CHUNKS, clip_norm=0.1),
        witness=True,
    ),
    "FSDP2, 2 stages of 2 chunks, backward in two parts": AxesCase(
        FOUR_BLOCKS,
        on(FSDP2_OF_STAGES, pipeline=2, emulate=FSDP2_SPLIT, clip_norm=0.1),
        witness=True,
    ),
    "FSDP2, 2 stages, checkpoints on the host": AxesCase(
        DEEP_LLAMA,
        on(FSDP2_OF_STAGES.but(FULL), pipeline=2, emulate=MOVING, clip_norm=0.1),
        witness=True,
    ),
    "FSDP2, 2 stages of 2 chunks, checkpoints on the host": AxesCase(
        FOUR_BLOCKS,
        on(
            FSDP2_OF_STAGES.but(FULL),
            pipeline=2,
            emulate=FSDP2_CHUNKS.but(offload_wrapper=True),
        ),
        poison=True,
    ),
    "FSDP2, 2 stages in a V": AxesCase(
        FOUR_BLOCKS,
        on(
            FSDP2_OF_STAGES,
            pipeline=2,
            emulate=FSDP2_SPLIT.but(pipeline_schedule=PipelineSchedule.ZERO_BUBBLE_IN_V),
        ),
        witness=True,
    ),
    "FSDP2, 2 stages of 2 chunks, backward in two parts, poisoned": AxesCase(
        replace(SMALL_LLAMA, layers=4),
        on(FSDP2_OF_STAGES, pipeline=2, emulate=FSDP2_SPLIT),
        poison=True,
    ),
}
FOUR_RANKS = {
    "nanotron, 2 stages, 2 replicas": AxesCase(
        SMALL_LLAMA, on(NANOTRON, data=2, pipeline=2, stage=1, clip_norm=0.1), poison=True
    ),
    "nanotron, 2 stages, tensor 2, tokens cut": AxesCase(
        SMALL_LLAMA, on(NANOTRON, tensor=2, pipeline=2, emulate=CUT, clip_norm=0.1), witness=True
    ),
    "nanotron, 4 stages": AxesCase(WIDE_GPT, on(NANOTRON, pipeline=4)),
    "Megatron-LM, 2 stages, tensor 2, tied, tokens cut": AxesCase(
        TIED_GPT, on(MEGATRON_OF_TOKENS, tensor=2, pipeline=2, clip_norm=0.1), witness=True
    ),
    "Megatron-LM, 2 stages of 2 chunks, 2 replicas": AxesCase(
        FOUR_BLOCKS,
        on(
            MEGATRON,
            data=2,
            pipeline=2,
            emulate=CHUNKS.but(overlap_grad_reduce=True, overlap_param_gather=True),
        ),
        poison=True,
    ),
    "Megatron-LM, stage 0, 2 stages, tensor 2, tied, messages in parts": AxesCase(
        TIED_GPT,
        on(MEGATRON, tensor=2, pipeline=2, stage=0, emulate=PARTS, clip_norm=0.1),
        witness=True,
    ),
    "Megatron-LM, 2 stages, tied, the first of one block, 2 replicas": AxesCase(
        replace(TIED_GPT, layers=3),
        on(MEGATRON, data=2, pipeline=2, emulate=FIRST_OF_ONE, clip_norm=0.1),
        witness=True,
    ),
    "Megatron-LM, 4 stages, embedding and loss alone": AxesCase(
        FOUR_BLOCKS, on(MEGATRON, pipeline=4, emulate=LAID_OUT), poison=True
    ),
    "Megatron-LM, stage 0, 2 stages, 2 replicas": AxesCase(
        SMALL_GPT,
        on(
            MEGATRON,
            data=2,
            pipeline=2,
            stage=0,
            emulate=Megatron(overlap_grad_reduce=True, bucket_size=100),
        ),
        poison=True,
    ),
    "stage 3, tensor 2, 2 replicas, tokens cut": AxesCase(
        SMALL_GPT, on(OF_TOKENS, data=2, tensor=2, stage=3)
    ),
    "FSDP2, 2 stages of 2 chunks, 2 replicas": AxesCase(
        FOUR_BLOCKS, on(FSDP2_OF_STAGES, data=2, pipeline=2, emulate=FSDP2_CHUNKS), witness=True
    ),
    "FSDP2, 2 stages, 2 replicas, checkpoints on the host": AxesCase(
        DEEP_LLAMA,
        on(FSDP2_OF_STAGES.but(FULL), data=2, pipeline=2, emulate=MOVING),
        witness=True,
    ),
    "FSDP2, 2 stages, tensor 2": AxesCase(
        SMALL_LLAMA, on(FSDP2_OF_STAGES, tensor=2, pipeline=2, clip_norm=0.1), witness=True
    ),
    "FSDP2, 2 stages of 2 chunks, tensor 2, backward in two parts": AxesCase(
        FOUR_BLOCKS,
        on(FSDP2_OF_STAGES, tensor=2, pipeline=2, emulate=FSDP2_SPLIT, clip_norm=0.1),
        poison=True,
    ),
    "FSDP2, 2 stages in a V, tensor 2, hidden states whole": AxesCase(
        replace(SMALL_LLAMA, layers=4),
        on(
            FSDP2_OF_STAGES,
            tensor=2,
            pipeline=2,
            emulate=FSDP2_SPLIT.but(
                pipeline_schedule=PipelineSchedule.ZERO_BUBBLE_IN_V, enable_sequence_parallel=False
            ),
        ),
        witness=True,
    ),
}
SHAPES: tuple[Architecture, ...] = (TIED_GPT, SMALL_GPT, SMALL_LLAMA, SMALL_GPT)
"""For the stages, one each."""
SELECTIVE = {"activations": Activations(checkpointing=Checkpointing.SELECTIVE)}
ODD = {
    "blocks called again": AxesCase(
        replace(SMALL_GPT, layers=4, hidden_groups=2), on(PLAIN, tensor=2, stage=3)
    ),
    "plain attention, made again": AxesCase(
        replace(SMALL_LLAMA, attention=Attention.PLAIN, recompute_attention=True),
        on(PLAIN, tensor=2, stage=2).but(SELECTIVE),
    ),
    "SwiGLU, RMSNorm, biases of queries alone": AxesCase(
        replace(
            SMALL_GPT,
            bias=False,
            qkv_bias=True,
            norm=Norm.RMS,
            activation=Activation.SWIGLU,
            intermediate_size=10,
        ),
        on(PLAIN, tensor=2, stage=1),
    ),
    "half a sequence on each rank": AxesCase(
        replace(SMALL_GPT, position_embeddings=8),
        on(NANOTRON, tensor=2, emulate=CUT),
        micro_batch_size=1,
    ),
    "a sequence and a half on each rank": AxesCase(
        SMALL_GPT, on(NANOTRON, tensor=2, emulate=KEPT), micro_batch_size=3
    ),
}
MORE = {
    2: {
        f"stage {stage}, tensor 2, {checkpoints}": AxesCase(
            shape, on(PLAIN, tensor=2, stage=stage, clip_norm=0.1).but(changes), poison=True
        )
        for stage, shape in enumerate(SHAPES)
        for checkpoints, changes in {"none": {}, "full": FULL, "partitioned": PARTITIONED}.items()
    }
    | {
        f"nanotron, tensor 2, {mode}, stage {stage}, {checkpoints}": AxesCase(
            shape, on(NANOTRON, tensor=2, stage=stage, emulate=mode).but(changes), witness=True
        )
        for mode in (Nanotron(), CUT, KEPT)
        for stage, shape in enumerate(SHAPES[1:3])
        for checkpoints, changes in {"none": {}, "full": FULL}.items()
    }
    | ODD,
    4: {
        f"nanotron, {data} x {tensor} x {pipeline}, {mode}, stage {stage}, {checkpoints}": AxesCase(
            DEEP_LLAMA,
            on(NANOTRON, data, tensor, pipeline, stage=stage, emulate=mode, clip_norm=0.1).but(
                changes
            ),
            poison=stage == 0,
            witness=stage == 1,
        )
        for data, tensor, pipeline in ((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4))
        for mode in (Nanotron(), CUT, KEPT)
        for stage in (0, 1)
        for checkpoints, changes in {"none": {}, "full": FULL}.items()
        if tensor != 4  # two heads of keys
    }
    | {
        f"{name}, tensor 4": AxesCase(SMALL_GPT, on(strategy, tensor=4), poison=True)
        for name, strategy in {
            "Megatron-LM": MEGATRON,
            "Megatron-LM, tokens cut": MEGATRON_OF_TOKENS,
            "stage 1, tokens cut": OF_TOKENS.but({"zero.stage": 1}),
        }.items()
    }
    | {
        f"{name}, tensor 2, 2 replicas": AxesCase(
            SMALL_GPT, on(strategy, data=2, tensor=2), witness=True
        )
        for name, strategy in {
            "Megatron-LM": MEGATRON,
            "Megatron-LM, tokens cut": MEGATRON_OF_TOKENS,
            "FSDP2, tokens cut": FSDP2_OF_TOKENS,
        }.items()
    },
}


def results_of(pool: RankPool, case: AxesCase) -> list[RankResult]:
    """Train a case on the ranks of a pool; observed where a trace is judged."""
    (results,) = trained_on_axes(pool, [replace(case, observe=case.witness)])
    return results


def assert_as_one_process(pool: RankPool, case: AxesCase) -> list[RankResult]:
    """Train a case on ranks and by a plain loop; return what ranks have left.

    One in a half format has no plain loop, whose parameters are as wide as its masters.
    """
    results = results_of(pool, case)
    assert {result.losses for result in results} == {results[0].losses}
    bound = BOUND.get(case.strategy.train.precision)
    if bound is not None:
        before, after, losses = by_plain_loop(case)
        assert results[0].losses == pytest.approx(losses, rel=10 * bound)
        assert distance(whole(case, results), after, before) <= bound
    if case.witness:
        trace = merged([result.trace for result in results])
        assert refinement.examine(case.job().schedule, trace) == []
    return results


def alone(case: AxesCase) -> Strategy:
    """The strategy of a case without axes, and without what splits layers over stages."""
    runtime = case.strategy.zero.emulate
    if isinstance(runtime, Megatron):
        fields = Megatron.model_fields
        runtime = runtime.but(**{name: fields[name].default for name in runtime.split_options})
    elif isinstance(runtime, FSDP2):  # stages reduce once, whatever is said
        runtime = runtime.but(
            pipeline_schedule=PipelineSchedule.ONE_FORWARD_ONE_BACKWARD, gradient_sync=Sync.LAST
        )
    return on(case.strategy, emulate=runtime)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_train_as_one_process_and_stages_of_a_pipeline_to_its_bits(
    pool_of: SharedPools, name: str
) -> None:
    case = TWO_RANKS[name]
    results = assert_as_one_process(pool_of(2), case)
    if case.strategy.parallel.pipeline == 1 or case.shape.tied_embeddings:
        return  # gradients are summed over the tensor axis, or stage by stage
    # In a process of its own, where kernels have one thread as on the ranks: they round alike.
    (one,) = results_of(pool_of(1), replace(case, strategy=alone(case)))
    assert results[0].losses == one.losses
    parameters = whole(case, results)
    for parameter, value in whole(case, [one]).items():
        assert torch.equal(parameters[parameter], value), parameter


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_on_two_axes_train_as_one_process(pool_of: SharedPools, name: str) -> None:
    assert_as_one_process(pool_of(4), FOUR_RANKS[name])


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, cases in MORE.items() for name in cases]
)
def test_every_runtime_trains_on_its_axes_as_one_process(
    pool_of: SharedPools, ranks: int, name: str
) -> None:
    assert_as_one_process(pool_of(ranks), MORE[ranks][name])
