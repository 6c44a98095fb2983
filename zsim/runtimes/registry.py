"""Schedules and data volumes of a strategy, written by the runtime that it emulates."""

import fnmatch
from typing import TypeVar

from zsim import closed_form
from zsim.closed_form import DataVolume
from zsim.closed_form.data_volume import CopiedBytes
from zsim.closed_form.zero_stages import VOLUME
from zsim.gc_paused import uncollected
from zsim.model.model import Model, ModelError
from zsim.runtimes.lookup import part, runtimes
from zsim.runtimes.runtime import Runtime
from zsim.schedule.schedule import FileBytes, HostBytes, Schedule, WireBytes
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Strategy
from zsim.zero import stages as own

_Part = TypeVar("_Part")

OWN = Runtime(options=RuntimeOptions, schedule=own.schedule, volume=lambda _: VOLUME)
"""zsim's own stages, whose options are in the strategy."""


def runtime_of(strategy: Strategy) -> Runtime:
    """Return the runtime that a strategy emulates, or zsim's own stages."""
    if strategy.zero.emulate is None:
        return OWN
    kind = type(strategy.zero.emulate)
    return next(each for each in runtimes().values() if each.options is kind)


def _part(strategy: Strategy, value: _Part | str, name: str) -> _Part:
    """Return a part of the runtime that a strategy emulates."""
    runtime = strategy.zero.emulate
    return part(value, name=f"{'' if runtime is None else runtime.table()}.{name}")


def make_schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule in which every rank trains `model` with `strategy`.

    Raises:
        ModelError: the model was built for other parallel degrees, a checkpoint cannot be
            partitioned, another runtime has nothing to train, or a pattern of a parameter group
            matches no parameter.
    """
    need_trainable(model, strategy)
    with uncollected():
        return _part(strategy, runtime_of(strategy).schedule, "schedule")(model, strategy)


def need_trainable(model: Model, strategy: Strategy) -> None:
    """Raise ModelError if it is known, before building it, that the schedule cannot exist.

    Raises:
        ModelError: an emulated runtime has no parameters to train, cannot freeze them, or does not
            sum gradients of norms of heads over tensor ranks; a pattern of a parameter group
            matches nothing; or the runtime's `need` fails.
    """
    if strategy.zero.emulate is not None and not model.parameters:
        raise ModelError("model.parameters: none; only zsim's own stages take such a model")
    frozen = model.frozen.difference(each.name for each in model.biases)
    if frozen and not (strategy.zero.emulate is None or strategy.zero.emulate.takes_frozen):
        takers = [name for name, each in runtimes().items() if each.options.takes_frozen]
        name = type(strategy.zero.emulate).__name__
        raise ModelError(
            f"model.frozen: {min(frozen)}: frozen parameters are not modelled for {name}; "
            f"use zero.emulate = {' or '.join(takers)}, or zsim's own stages"
        )
    _need_whole_weights(model, strategy)
    if model.summed_copies and not (
        strategy.zero.emulate is None or strategy.zero.emulate.sums_copies
    ):
        takers = [name for name, each in runtimes().items() if each.options.sums_copies]
        name = type(strategy.zero.emulate).__name__
        raise ModelError(
            f"model.qk_norm: {name} does not sum gradients of {min(model.summed_copies)} over "
            f"{model.tensor} tensor ranks; use parallel.tensor = 1, zero.emulate = "
            f"{' or '.join(takers)}, or zsim's own stages"
        )
    _need_groups(model, strategy)
    if (need := runtime_of(strategy).need) is not None:
        _part(strategy, need, "need")(model, strategy)


def _need_whole_weights(model: Model, strategy: Strategy) -> None:
    """Raise ModelError if weights in 4 bits would be sharded, which is not modelled."""
    formats = {each.quantized for each in model.parameters} - {None}
    runtime = strategy.zero.emulate
    keeps = runtime is not None and runtime.keeps_quantized and strategy.zero.stage < 3
    if formats and not keeps:
        takers = [name for name, each in runtimes().items() if each.options.keeps_quantized]
        raise ModelError(
            f"model.lora.quantization: {min(map(str, formats))} is modelled below zero.stage 3 of "
            f"{' and '.join(takers)}; say zero.emulate = {takers[0]}"
        )


def _need_groups(model: Model, strategy: Strategy) -> None:
    names = [parameter.name for parameter in model.parameters]
    for pattern in (each for group in strategy.train.groups for each in group.parameters):
        if not fnmatch.filter(names, pattern):
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ModelError(f"train.group: {pattern!r} is no parameter; there are {some}")


def _volume(strategy: Strategy) -> DataVolume:
    return _part(strategy, runtime_of(strategy).volume, "volume")(strategy)


def wire_bytes(model: Model, strategy: Strategy) -> tuple[WireBytes, ...]:
    """Return the bytes that a rank sends in a step by closed form, by group and collective.

    Raises:
        ModelError: the units do not fill the pipeline stages.
    """
    return closed_form.wire_bytes(model, strategy, _volume(strategy))


def copied_bytes(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return by closed form the bytes that a rank copies on its device in a step, at least."""
    copied = _volume(strategy).copied
    return CopiedBytes() if copied is None else copied(model, strategy)


def host_bytes(model: Model, strategy: Strategy) -> tuple[HostBytes, ...]:
    """Return by closed form the bytes a rank copies to and from its host in a step, by role.

    Raises:
        ModelError: the units do not fill the pipeline stages.
    """
    return closed_form.host_bytes(model, strategy, _volume(strategy))


def file_bytes(model: Model, strategy: Strategy) -> FileBytes | None:
    """Return by closed form the bytes that a rank reads and writes in files in a step."""
    return closed_form.file_bytes(model, strategy, _volume(strategy))
