"""Right schedules whose ranks are stages of a pipeline: those of each runtime that has them."""

from faults.variants import (
    ADAM,
    BF16,
    FP16,
    GIVEN,
    RECOMPUTED,
    SCALE,
    UNCLIPPED,
    accumulating,
    by,
    over,
    zero,
)
from zsim.dtype import DType
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron, TensorMode

TRAIN = Train(gradient_accumulation_steps=3, optimizer=ADAM, loss_scale=SCALE, clip_norm=1.0)


def of_pipelines() -> list[Strategy]:
    """Return stages of a pipeline, alone, with a data axis, with a tensor axis that cuts tokens."""
    cut = zero(emulate=Nanotron(tp_mode=TensorMode.REDUCE_SCATTER))
    base = Strategy(
        parallel=Parallel(pipeline=2),
        zero=Zero(stage=1, emulate=Nanotron()),
        train=TRAIN.but(gradient_accumulation_steps=2),
    )
    return [
        base.but(over(data=2) | BF16),
        base.but(over(data=2, tensor=2) | cut | by(GIVEN)),
        base.but(zero(stage=0) | FP16),
        base.but(zero(stage=0) | over(pipeline=4) | UNCLIPPED),
        base.but(over(pipeline=1, tensor=2, data=2) | cut | BF16),
    ]


def of_megatron_pipelines() -> list[Strategy]:
    """Return stages with as many layers: overlap, replicas, cut tokens, recomputation, chunks."""
    base = Strategy(
        parallel=Parallel(pipeline=2, data=2), zero=Zero(stage=1, emulate=Megatron()), train=TRAIN
    )
    overlapped = Megatron(
        bucket_size=40,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        grad_reduce_in_fp32=True,
    )
    chunks = overlapped.but(num_layers_per_virtual_pipeline_stage=1)
    cut = Megatron(sequence_parallel=True)
    return [
        base.but(zero(emulate=overlapped) | BF16),
        base.but(over(tensor=2) | zero(emulate=cut) | FP16 | RECOMPUTED),
        base.but(over(pipeline=4, data=1, replicate=2) | by(GIVEN) | UNCLIPPED),
        base.but(zero(emulate=chunks) | BF16 | accumulating(2)),
    ]


def of_unlike_stages() -> list[Strategy]:
    """Return stages of Megatron-LM with unlike numbers of layers, of a model with four layers.

    They are ends of the pipeline, alone, in chunks, and without shards.
    """
    base = Strategy(
        parallel=Parallel(pipeline=3, data=2),
        zero=Zero(stage=1, emulate=Megatron(num_layers_in_last_pipeline_stage=2)),
        train=TRAIN,
    )
    overlapped = Megatron(
        bucket_size=40,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        pipeline_model_parallel_layout="Et|tt|t|L",
    )
    cut = Megatron(num_layers_in_first_pipeline_stage=1, sequence_parallel=True)
    alone = Megatron(pipeline_model_parallel_layout="E|ttt|t|L")
    return [
        base.but(BF16),
        base.but(over(pipeline=2, tensor=2) | zero(stage=0, emulate=cut) | FP16 | RECOMPUTED),
        base.but(over(pipeline=4, data=1) | zero(emulate=alone) | by(GIVEN) | UNCLIPPED),
        base.but(over(pipeline=2) | zero(emulate=overlapped) | BF16 | accumulating(2)),
    ]


def of_fsdp2_pipelines() -> list[Strategy]:
    """Return stages that reduce once: kept and freed blocks, replicas, cut tokens, chunks."""
    kept = FSDP2(reshard_after_forward=False, reduce_dtype=DType.FP32)
    base = Strategy(
        parallel=Parallel(pipeline=2, data=2), zero=Zero(stage=3, emulate=kept), train=TRAIN
    )
    freed = zero(emulate=kept.but(reshard_after_forward=True))
    chunks = zero(emulate=kept.but(pipeline_schedule=PipelineSchedule.INTERLEAVED))
    split = zero(emulate=kept.but(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE))
    return [
        base.but(BF16),
        base.but(over(tensor=2) | freed | FP16 | RECOMPUTED),
        base.but(over(pipeline=3, data=1, replicate=2) | by(GIVEN) | UNCLIPPED),
        base.but(chunks | BF16 | accumulating(2)),
        base.but(split | FP16 | accumulating(2)),
        base.but(over(tensor=2, data=1) | split | BF16 | accumulating(2)),
    ]
