"""In which number formats a strategy has gradients reduced, accumulated and applied.

Exact numbers cannot tell formats apart, so they are compared with what the strategy says.
"""

from dataclasses import dataclass

from zsim.dtype import DType
from zsim.runtime.deepspeed import DeepSpeed
from zsim.runtime.fsdp1 import FSDP1
from zsim.runtime.fsdp2 import FSDP2
from zsim.runtime.megatron import Megatron
from zsim.runtime.nanotron import Nanotron
from zsim.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats on the way from a gradient to an update.

    Attributes:
        compute: of parameters, activations, and the gradients that backward makes.
        reduction: in which gradients are summed over ranks that see different data.
        whole: in which gradients of several micro-batches are summed before their reduction.
        reduced: in which they are summed after it.
        optimizer: of what the update reads and writes.
    """

    compute: DType
    reduction: DType
    whole: DType
    reduced: DType
    optimizer: DType


def formats(strategy: Strategy) -> Formats:
    """Return the formats of a strategy; each runtime's are those of the release that is emulated.

    FSDP1 accumulates whole gradients as the module's parameters are, and sharded ones in the
    format of the sharded parameter (torch 2.13, `_runtime_utils._accumulate_sharded_grad`); FSDP2
    likewise, whole ones in `reduce_dtype` (`FSDPParam.to_accumulated_grad_if_needed`). DeepSpeed
    accumulates as the module's parameters are (0.16, `stage3.partition_grads`), at stage 1 as the
    optimizer's states are (`stage_1_and_2`, `grad_accum`). Megatron-LM has
    one buffer for both (`grad_reduce_in_fp32`), nanotron keeps gradients in fp32
    (`FP32GradientAccumulator`).
    """
    compute, optimizer = strategy.precision.compute, strategy.precision.optimizer
    reduction = whole = reduced = compute
    match strategy.emulate:
        case FSDP1(reduce_dtype=chosen):
            reduction, reduced = chosen or compute, optimizer
        case FSDP2(reduce_dtype=chosen):
            reduction = whole = chosen or compute
            reduced = optimizer
        case DeepSpeed(communication_data_type=chosen):
            reduction = chosen or compute
            whole = optimizer if strategy.stage == 1 else compute
        case Megatron(grad_reduce_in_fp32=wide):
            reduction = whole = reduced = DType.FP32 if wide else compute
        case Nanotron():
            reduction = whole = reduced = DType.FP32
        case None:
            pass
    return Formats(
        compute=compute, reduction=reduction, whole=whole, reduced=reduced, optimizer=optimizer
    )
