"""Right schedules whose ranks are stages of a pipeline: those of each runtime that has them."""

from edits.updates import ADAM, GIVEN, SCALE
from zsim.dtype import DType
from zsim.runtimes.fsdp2.options import FSDP2, PipelineSchedule
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.nanotron.options import Nanotron, TensorMode
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train


def of_pipelines() -> list[Strategy]:
    """Stages of a pipeline, alone, with a data axis, with a tensor axis that cuts tokens."""
    cut = Nanotron(tp_mode=TensorMode.REDUCE_SCATTER)
    base = Strategy(
        parallel=Parallel(pipeline=2),
        zero=Zero(stage=1, emulate=Nanotron()),
        train=Train(gradient_accumulation_steps=2, optimizer=ADAM, loss_scale=SCALE, clip_norm=1.0),
    )
    return [
        base.but({"parallel.data": 2, "train.precision": Precision.BF16}),
        base.but(
            {
                "parallel.data": 2,
                "parallel.tensor": 2,
                "zero.emulate": cut,
                "train.optimizer": GIVEN,
            }
        ),
        base.but({"zero.stage": 0, "train.precision": Precision.FP16}),
        base.but({"zero.stage": 0, "parallel.pipeline": 4, "train.clip_norm": None}),
        base.but(
            {
                "parallel.pipeline": 1,
                "parallel.tensor": 2,
                "parallel.data": 2,
                "zero.emulate": cut,
                "train.precision": Precision.BF16,
            }
        ),
    ]


def of_megatron_pipelines() -> list[Strategy]:
    """Stages with as many layers: overlap, replicas, tokens cut, recomputed layers, chunks."""
    base = Strategy(
        parallel=Parallel(pipeline=2, data=2),
        zero=Zero(stage=1, emulate=Megatron()),
        train=Train(gradient_accumulation_steps=3, optimizer=ADAM, loss_scale=SCALE, clip_norm=1.0),
    )
    overlapped = Megatron(
        bucket_size=40,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        grad_reduce_in_fp32=True,
    )
    return [
        base.but({"zero.emulate": overlapped, "train.precision": Precision.BF16}),
        base.but(
            {
                "parallel.tensor": 2,
                "zero.emulate": Megatron(sequence_parallel=True),
                "train.precision": Precision.FP16,
                "activations.checkpointing": Checkpointing.FULL,
            }
        ),
        base.but(
            {
                "parallel.pipeline": 4,
                "parallel.data": 1,
                "parallel.replicate": 2,
                "train.optimizer": GIVEN,
                "train.clip_norm": None,
            }
        ),
        base.but(
            {
                "zero.emulate": overlapped.but(num_layers_per_virtual_pipeline_stage=1),
                "train.precision": Precision.BF16,
                "train.gradient_accumulation_steps": 2,
            }
        ),
    ]


def of_unlike_stages() -> list[Strategy]:
    """Stages of Megatron-LM with unlike numbers of layers: ends, alone, in chunks, without shards.

    All are of a model with four layers.
    """
    base = Strategy(
        parallel=Parallel(pipeline=3, data=2),
        zero=Zero(stage=1, emulate=Megatron(num_layers_in_last_pipeline_stage=2)),
        train=Train(gradient_accumulation_steps=3, optimizer=ADAM, loss_scale=SCALE, clip_norm=1.0),
    )
    overlapped = Megatron(
        bucket_size=40,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        pipeline_model_parallel_layout="Et|tt|t|L",
    )
    return [
        base.but({"train.precision": Precision.BF16}),
        base.but(
            {
                "parallel.pipeline": 2,
                "parallel.tensor": 2,
                "zero.stage": 0,
                "zero.emulate": Megatron(
                    num_layers_in_first_pipeline_stage=1, sequence_parallel=True
                ),
                "train.precision": Precision.FP16,
                "activations.checkpointing": Checkpointing.FULL,
            }
        ),
        base.but(
            {
                "parallel.pipeline": 4,
                "parallel.data": 1,
                "zero.emulate": Megatron(pipeline_model_parallel_layout="E|ttt|t|L"),
                "train.optimizer": GIVEN,
                "train.clip_norm": None,
            }
        ),
        base.but(
            {
                "parallel.pipeline": 2,
                "zero.emulate": overlapped,
                "train.precision": Precision.BF16,
                "train.gradient_accumulation_steps": 2,
            }
        ),
    ]


def of_fsdp2_pipelines() -> list[Strategy]:
    """Stages that reduce once: blocks kept and freed, replicas, tokens cut, chunks, zero bubble."""
    kept = FSDP2(reshard_after_forward=False, reduce_dtype=DType.FP32)
    base = Strategy(
        parallel=Parallel(pipeline=2, data=2),
        zero=Zero(stage=3, emulate=kept),
        train=Train(gradient_accumulation_steps=3, optimizer=ADAM, loss_scale=SCALE, clip_norm=1.0),
    )
    chunks = kept.but(pipeline_schedule=PipelineSchedule.INTERLEAVED)
    split = kept.but(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE)
    return [
        base.but({"train.precision": Precision.BF16}),
        base.but(
            {
                "parallel.tensor": 2,
                "zero.emulate": kept.but(reshard_after_forward=True),
                "train.precision": Precision.FP16,
                "activations.checkpointing": Checkpointing.FULL,
            }
        ),
        base.but(
            {
                "parallel.pipeline": 3,
                "parallel.data": 1,
                "parallel.replicate": 2,
                "train.optimizer": GIVEN,
                "train.clip_norm": None,
            }
        ),
        base.but(
            {
                "zero.emulate": chunks,
                "train.precision": Precision.BF16,
                "train.gradient_accumulation_steps": 2,
            }
        ),
        base.but(
            {
                "zero.emulate": split,
                "train.precision": Precision.FP16,
                "train.gradient_accumulation_steps": 2,
            }
        ),
        base.but(
            {
                "parallel.tensor": 2,
                "parallel.data": 1,
                "zero.emulate": split,
                "train.precision": Precision.BF16,
                "train.gradient_accumulation_steps": 2,
            }
        ),
    ]
