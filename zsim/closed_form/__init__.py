"""What a step must move, from model and strategy alone: the second opinion on every schedule.

Written without the scheduler, which it may not import. Volumes are ring-equivalent bytes that one
rank sends in a step, exact integers (Rajbhandari et al. 2020, section 7, extended by micro-batches,
formats and padding). Each runtime's parameters and gradients stand in a file of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from zsim.closed_form import deepspeed3, deepspeed12, fsdp1, fsdp2, megatron, nanotron, own
from zsim.closed_form.checkpoint import host_bytes
from zsim.closed_form.pipeline import handed_on
from zsim.closed_form.sequence import sequence
from zsim.closed_form.tensor import tensor
from zsim.model import Model
from zsim.pipeline import stages
from zsim.runtime.deepspeed import DeepSpeed
from zsim.runtime.fsdp1 import FSDP1
from zsim.runtime.fsdp2 import FSDP2
from zsim.runtime.megatron import Megatron
from zsim.runtime.nanotron import Nanotron
from zsim.schedule import WireBytes
from zsim.strategy import Precision, Strategy

__all__ = ["host_bytes", "wire_bytes"]


def wire_bytes(model: Model, strategy: Strategy) -> tuple[WireBytes, ...]:
    """Volume of a step by group and collective, sorted; what is zero is left out.

    With a pipeline, by stage.

    Raises:
        ModelError: the units do not fill the stages.
    """
    if strategy.pipeline == 1:
        return _volume(model, strategy)
    return tuple(
        replace(line, role=stage.name)
        for stage in stages(model, strategy.pipeline)
        for line in _volume(stage.model, strategy, handed_on(stage, strategy))
    )


def _volume(
    model: Model, strategy: Strategy, others: Sequence[WireBytes] = ()
) -> tuple[WireBytes, ...]:
    """That of ranks that run all units of `model`, and of what they do as well."""
    found = [
        *others,
        *_data(model, strategy),
        *tensor(model, strategy),
        *sequence(model, strategy),
        *_scalars(model, strategy),
    ]
    total: Counter[tuple[str, str, bool]] = Counter()
    for volume in found:
        total[volume.group, volume.collective, volume.scalar] += volume.bytes
    return tuple(
        WireBytes(group=group, collective=collective, bytes=size, scalar=scalar)
        for (group, collective, scalar), size in sorted(total.items())
        if size
    )


def _data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Parameters and gradients, over the data axes."""
    match strategy.emulate:
        case FSDP1() as options:
            return fsdp1.data(model, strategy, options)
        case FSDP2() as options:
            return fsdp2.data(model, strategy, options)
        case DeepSpeed() as options if strategy.stage == 3:
            return deepspeed3.data(model, strategy, options)
        case Megatron() as options:
            return megatron.data(model, strategy, options)
        case Nanotron() as options:
            return nanotron.data(model, strategy, options)
        case DeepSpeed() as options if strategy.stage < 3:
            return deepspeed12.data(model, strategy, options)
        case _:
            return own.data(model, strategy)


def _norms(model: Model, strategy: Strategy) -> int:
    """Norms that are reduced: one where gradients are clipped, with DeepSpeed always."""
    match strategy.emulate:
        case DeepSpeed() as options if strategy.stage == 3:
            return deepspeed3.norms(model, strategy, options)
        case DeepSpeed():
            return 1
        case _:
            return 0 if strategy.clip_norm is None else 1


def _scalars(model: Model, strategy: Strategy) -> list[WireBytes]:
    """The overflow flag with fp16, over all ranks; norms.

    A norm is summed over the ranks that hold every gradient once.
    """
    size = strategy.precision.optimizer.size_bytes
    overflow = 2 * (strategy.ranks - 1) * size if strategy.precision is Precision.FP16 else 0
    among = strategy.data * strategy.tensor * strategy.pipeline
    norm = 2 * (among - 1) * size * _norms(model, strategy)
    if strategy.replicate == 1:
        overflow, norm = overflow + norm, 0
    return [
        WireBytes(group="world", collective="all_reduce", bytes=overflow, scalar=True),
        WireBytes(group="replica", collective="all_reduce", bytes=norm, scalar=True),
    ]
