"""Small built mixtures of experts, on ranks of several axes."""

from dataclasses import replace

from fitting import fitting

from zsim.model.architecture import Llama
from zsim.model.experts import Experts
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

EXPERTS = Experts(count=8, top_k=2, intermediate_size=6)
SHAPE = Llama(
    layers=2, hidden_size=8, attention_heads=2, sequence_length=16, vocab_size=6, experts=EXPERTS
)
MEGATRON = Zero(stage=1, emulate=Megatron(sequence_parallel=True))
FOLDED = {"data": 4, "tensor": 2, "expert": 4, "expert_tensor": 1}
SHARED = {"data": 4, "context": 2, "tensor": 2, "expert": 8, "expert_tensor": 1}
"""Ranks of two sequences, each on two context and two tensor ranks."""


def strategy_of(
    zero: Zero = MEGATRON,
    kept: Checkpointing = Checkpointing.NONE,
    precision: Precision = Precision.BF16,
    /,
    **degrees: int,
) -> Strategy:
    """Return a strategy of two micro-batches on these ranks."""
    return Strategy(
        parallel=Parallel.of(degrees),
        zero=zero,
        activations=Activations(checkpointing=kept),
        train=Train(
            gradient_accumulation_steps=2, precision=precision, clip_norm=1.0, compile=True
        ),
    )


def model_of(strategy: Strategy, experts: Experts = EXPERTS) -> Model:
    """Return the model with these experts that a strategy trains."""
    made = fitting(replace(SHAPE, execution=strategy.execution, experts=experts), strategy)
    return in_blocks(made) if strategy.parallel.pipeline > 1 else made
