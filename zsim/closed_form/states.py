"""Persistent model states on a rank, by kind, from model and strategy: zsim's own stages only.

Rajbhandari et al. 2020, section 3.1: parameters; for trained ones fp32 masters if the precision
has them, and the optimizer's moments. The ZeRO stage determines which are sharded over the data
axis (section 5). With contiguous memory (MD, section 6.3) gradient accumulation buffers and
checkpoints persist as well.
"""

from zsim.closed_form.checkpoint import kept_bytes
from zsim.closed_form.zero_stages import buckets, padded_elements, sharded_elements
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.schedule.schedule import Kind
from zsim.strategy.optimizer_rule import scale_elements
from zsim.strategy.strategy import Strategy


def persistent_bytes(model: Model, strategy: Strategy) -> dict[Kind, int] | None:
    """Return the bytes of each kind on one rank; None for emulated runtimes."""
    if strategy.zero.emulate is not None:
        return None
    whole = padded_elements(model, strategy, frozen=False)
    shard = sharded_elements(model, strategy, frozen=False)
    held = whole + padded_elements(model, strategy, frozen=True)
    if strategy.zero.stage == 3:
        held = shard + sharded_elements(model, strategy, frozen=True)
    precision = strategy.train.precision
    optimized = (shard if strategy.zero.stage >= 1 else whole) * precision.optimizer.size_bytes
    return {
        Kind.PARAMETER: held * precision.compute.size_bytes + _biases(model),
        Kind.MASTER: optimized if strategy.keeps_master else 0,
        Kind.MOMENT: _moments(model, strategy, optimized),
        Kind.GRADIENT: _gradients(whole, shard, strategy) * precision.compute.size_bytes,
        Kind.SAVED: kept_bytes(model, strategy) if strategy.zero.contiguous else 0,
    }


def _biases(model: Model) -> int:
    """Return the bytes of biases of experts, which every rank keeps whole in fp32."""
    return sum(each.elements for each in model.biases) * DType.FP32.size_bytes


def _moments(model: Model, strategy: Strategy, optimized: int) -> int:
    """Return the bytes of moments: `optimized` for each moment unless it is in 8 bits."""
    if not strategy.train.optimizer.quantized:
        return optimized * strategy.moments
    tensors = [each.elements for each in model.parameters if not each.frozen]
    if strategy.zero.stage:
        trained = [each for each in buckets(model, strategy) if not each.frozen]
        tensors = [each.shard(strategy) for each in trained]
    number = strategy.train.precision.optimizer.size_bytes
    each = optimized // number + scale_elements(tensors) * DType.FP32.size_bytes
    return strategy.moments * each


def _gradients(whole: int, shard: int, strategy: Strategy) -> int:
    """Return the number of elements that persist for gradients, of `whole` with padding."""
    if not strategy.zero.contiguous:
        return 0
    collects = strategy.zero.reduce_once and strategy.train.gradient_accumulation_steps > 1
    return (whole if strategy.zero.stage < 2 else shard) + (
        whole if strategy.zero.stage >= 2 and collects else 0
    )
