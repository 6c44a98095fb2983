"""Small pipelines of FSDP2."""

from fitting import fitting

from zsim.dtype import DType
from zsim.model.architecture import Llama
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule

SHAPE = Llama(layers=4, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
KEPT = FSDP2(reshard_after_forward=False, reduce_dtype=DType.FP32)
"""As torchtitan wraps the stages of a pipeline."""
CHUNKS = KEPT.but(pipeline_schedule=PipelineSchedule.INTERLEAVED)
"""Two chunks on each stage."""


def strategy_of(pipeline: int, micro_batches: int, options: FSDP2 = KEPT) -> Strategy:
    return Strategy(
        parallel=Parallel(pipeline=pipeline),
        zero=Zero(stage=3, emulate=options),
        train=Train(
            gradient_accumulation_steps=micro_batches, precision=Precision.BF16, clip_norm=1.0
        ),
    )


def model_of(strategy: Strategy, shape: Llama = SHAPE) -> Model:
    return in_blocks(fitting(shape, strategy))
