"""Bytes that a step must move, from model and strategy alone: an independent check of schedules.

Written without the scheduler, which it may not import. Volumes are ring-equivalent bytes that one
rank sends in a step, exact integers (Rajbhandari et al. 2020, section 7, extended by
micro-batches, formats and padding). Each runtime has its own volume of parameters and gradients
(`DataVolume`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from zsim.closed_form import offloaded
from zsim.closed_form.by_model import kept_stages
from zsim.closed_form.data_volume import DataVolume
from zsim.closed_form.exchanged_tokens import counts_on_host, loads_of_experts, tokens_of_experts
from zsim.closed_form.tensor import sequence, shared_sequence, tensor
from zsim.model.model import Model
from zsim.model.pipeline_stages import Stage
from zsim.schedule.schedule import FileBytes, HostBytes, WireBytes
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy

__all__ = ["DataVolume", "file_bytes", "host_bytes", "wire_bytes"]


def wire_bytes(model: Model, strategy: Strategy, volume: DataVolume) -> tuple[WireBytes, ...]:
    """Return the volume of a step by group and collective, sorted, without zeros.

    With a pipeline, by stage.

    Raises:
        ModelError: the units do not fill the stages.
    """
    scalars = _scalars(
        strategy, volume.norms(model, strategy), reduces_overflow=volume.reduces_overflow
    )
    if strategy.parallel.pipeline == 1:
        return _volume(model, strategy, volume.data(model, strategy), scalars)
    found: list[WireBytes] = []
    for stage in kept_stages(model, strategy):
        own = volume.of_stage
        data = volume.data(stage.model, strategy) if own is None else own(stage, strategy)
        sent = (volume.messages or _handed_on)(stage, strategy)
        lines = _volume(stage.model, strategy, [*sent, *data], scalars)
        found += [replace(line, role=stage.name) for line in lines]
    return tuple(found)


def host_bytes(model: Model, strategy: Strategy, volume: DataVolume) -> tuple[HostBytes, ...]:
    """Return the bytes that a rank copies to and from its host in a step, per role.

    There is one entry per pipeline stage, or a single one without a pipeline.

    Raises:
        ModelError: the units do not fill the stages.
    """
    if volume.host is None:
        return (_added(offloaded.host_bytes(model, strategy), [counts_on_host(model, strategy)]),)
    kept = volume.checkpoints or offloaded.checkpoint_bytes
    if strategy.parallel.pipeline == 1:
        others = [kept(model, strategy), counts_on_host(model, strategy)]
        return (_added(volume.host(model, strategy), others),)
    return tuple(
        replace(
            _added(
                volume.host(stage.model, strategy),
                [
                    counts_on_host(stage.model, strategy),
                    *(kept(chunk.model, strategy) for chunk in stage.chunks),
                ],
            ),
            role=stage.name,
        )
        for stage in kept_stages(model, strategy)
    )


def _added(states: HostBytes, others: Sequence[HostBytes]) -> HostBytes:
    """Return the sum of the bytes of `states` and of all `others`."""
    return HostBytes(
        to_host=states.to_host + sum(each.to_host for each in others),
        from_host=states.from_host + sum(each.from_host for each in others),
    )


def file_bytes(model: Model, strategy: Strategy, volume: DataVolume) -> FileBytes | None:
    """Return the bytes that a rank reads and writes in files in a step; None if it uses none."""
    return (volume.files or offloaded.file_bytes)(model, strategy)


def _volume(
    model: Model, strategy: Strategy, others: Sequence[WireBytes], scalars: Sequence[WireBytes]
) -> tuple[WireBytes, ...]:
    """Return the volume of ranks that run all units of `model`, with the given lines added."""
    found = [
        *others,
        *tensor(model, strategy),
        *sequence(model, strategy),
        *shared_sequence(model, strategy),
        *tokens_of_experts(model, strategy),
        *loads_of_experts(model, strategy),
        *scalars,
    ]
    total: Counter[tuple[str, str, bool]] = Counter()
    for line in found:
        total[line.group, line.collective, line.scalar] += line.bytes
    return tuple(
        WireBytes(group=group, collective=collective, bytes=size, scalar=scalar)
        for (group, collective, scalar), size in sorted(total.items())
        if size
    )


def _handed_on(stage: Stage, strategy: Strategy) -> list[WireBytes]:
    """Return the bytes that a stage sends in a step: its outputs, and gradients of its inputs.

    It receives as many of both. If ranks of the tensor axis each send a part, the receiving ranks
    gather the parts of values that can be split evenly.
    """
    sent = gathered = 0
    runtime, ranks = strategy.zero.emulate, strategy.parallel.tensor
    cuts = runtime is not None and runtime.cuts_messages(tensor=ranks)
    for value in stage.handed_on:
        is_cut = cuts and value.elements % ranks == 0
        part = value.size_bytes // ranks if is_cut else value.size_bytes
        sent += part
        gathered += (ranks - 1) * part if is_cut else 0
    times = strategy.train.gradient_accumulation_steps
    return [
        WireBytes(group="pipeline", collective="send", bytes=times * sent),
        WireBytes(group="tensor", collective="all_gather", bytes=times * gathered),
    ]


def _scalars(strategy: Strategy, norms: int, *, reduces_overflow: bool) -> list[WireBytes]:
    """Return the bytes of the overflow flag with fp16, over all ranks, and of norms.

    A norm is summed over the ranks that together hold every gradient once.
    """
    size = strategy.train.precision.optimizer.size_bytes
    tests = reduces_overflow and strategy.train.precision is Precision.FP16
    overflow = 2 * (strategy.ranks - 1) * size if tests else 0
    among = strategy.parallel.data * strategy.parallel.tensor * strategy.parallel.pipeline
    norm = 2 * (among - 1) * size * norms
    if strategy.parallel.replicate == 1:
        overflow, norm = overflow + norm, 0
    return [
        WireBytes(group="world", collective="all_reduce", bytes=overflow, scalar=True),
        WireBytes(group="replica", collective="all_reduce", bytes=norm, scalar=True),
    ]
