"""Small pipelines of Megatron-LM."""

from fitting import fitting

from zsim.model.architecture import Llama
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

SHAPE = Llama(layers=4, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
OVERLAPPED = Megatron(
    overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=100, grad_reduce_in_fp32=True
)


def strategy_of(pipeline: int, micro_batches: int, options: Megatron | None = None) -> Strategy:
    return Strategy(
        parallel=Parallel(pipeline=pipeline),
        zero=Zero(stage=1, emulate=options or Megatron()),
        train=Train(
            gradient_accumulation_steps=micro_batches, precision=Precision.BF16, clip_norm=1.0
        ),
    )


def model_of(strategy: Strategy, shape: Llama = SHAPE) -> Model:
    return in_blocks(fitting(shape, strategy))
