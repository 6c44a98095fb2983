"""Small pipelines of Megatron-LM, and durations by which their bubbles are counted."""

from dataclasses import dataclass

from fitting import fitting

from zsim.model.architecture import Llama
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.runtimes.megatron.options import Megatron
from zsim.schedule.operation import Compute
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

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


@dataclass(frozen=True)
class Uniform:
    """A stage takes so long forward and backward, and a reduction; everything else nothing."""

    firsts: frozenset[str]
    forward_ps: int
    backward_ps: int

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        del rank, step, operation
        return 0

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        del rank, step
        if operation not in self.firsts:
            return 0
        return self.forward_ps if operation.startswith("step/forward") else self.backward_ps

    def communication_ps(self, step: int, operation: str) -> int:
        del step, operation
        return 0


def firsts(made: Schedule) -> frozenset[str]:
    """The first forward and backward operation of each micro-batch on each stage."""
    found: dict[tuple[object, ...], str] = {}
    for program in made.programs:
        for operation in program.step:
            if isinstance(operation, Compute) and operation.unit:
                chunk = operation.id.partition("/chunk")[2].partition("/")[0]
                key = (program.role, operation.action, operation.micro_batch, chunk)
                found.setdefault(key, operation.id)
    return frozenset(found.values())
