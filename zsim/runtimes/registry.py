"""Runtimes by name: their options, schedules and data volumes.

A runtime is registered as an entry point of the group "zsim.runtimes": its name, and a `Runtime`.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from zsim import closed_form
from zsim.closed_form import DataVolume
from zsim.closed_form.data_volume import CopiedBytes
from zsim.closed_form.zero_stages import VOLUME
from zsim.gc_paused import uncollected
from zsim.model.model import Model, ModelError
from zsim.schedule.schedule import FileBytes, HostBytes, Schedule, WireBytes
from zsim.strategy.runtime_options import RuntimeOptions, registered
from zsim.strategy.strategy import Strategy
from zsim.zero import stages as own


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime whose order of operations is emulated.

    Attributes:
        options: class of its options, which also states its features.
        schedule: returns the schedule in which every rank trains a model with a strategy.
        volume: returns the data volumes of the schedule, given only the strategy.
        need: raises ModelError if it can tell, without building it, that `schedule` fails; None if
            there is no such check.
    """

    options: type[RuntimeOptions]
    schedule: Callable[[Model, Strategy], Schedule]
    volume: Callable[[Strategy], DataVolume]
    need: Callable[[Model, Strategy], None] | None = None


OWN = Runtime(options=RuntimeOptions, schedule=own.schedule, volume=lambda _: VOLUME)
"""zsim's own stages, whose options are in the strategy."""


@cache
def runtimes() -> Mapping[str, Runtime]:
    """Return every installed runtime by name.

    Raises:
        TypeError: a registered object is not a `Runtime`.
    """
    found: dict[str, Runtime] = {}
    for name, runtime in registered().items():
        if not isinstance(runtime, Runtime):
            raise TypeError(f"runtime {name!r}: {runtime!r} must be a Runtime")
        found[name] = runtime
    return found


def runtime_of(strategy: Strategy) -> Runtime:
    """Return the runtime that a strategy emulates, or zsim's own stages."""
    if strategy.zero.emulate is None:
        return OWN
    kind = type(strategy.zero.emulate)
    return next(each for each in runtimes().values() if each.options is kind)


def make_schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule in which every rank trains `model` with `strategy`.

    Raises:
        ModelError: the model was built for other parallel degrees, a checkpoint cannot be
            partitioned, another runtime has nothing to train, or a pattern of a parameter group
            matches no parameter.
    """
    need_trainable(model, strategy)
    with uncollected():
        return runtime_of(strategy).schedule(model, strategy)


def need_trainable(model: Model, strategy: Strategy) -> None:
    """Raise ModelError if it is known, before building it, that the schedule cannot exist.

    Raises:
        ModelError: an emulated runtime has no parameters to train, cannot freeze them, or does not
            sum gradients of norms of heads over tensor ranks; a pattern of a parameter group
            matches nothing; or the runtime's `need` fails.
    """
    if strategy.zero.emulate is not None and not model.parameters:
        raise ModelError("model.parameters: none; only zsim's own stages take such a model")
    if model.frozen and not (strategy.zero.emulate is None or strategy.zero.emulate.takes_frozen):
        takers = [name for name, each in runtimes().items() if each.options.takes_frozen]
        name = type(strategy.zero.emulate).__name__
        raise ModelError(
            f"model.frozen: {min(model.frozen)}; {name} trains every parameter here, frozen ones "
            f"go with zsim's own stages, {', '.join(takers)}"
        )
    if model.summed_copies and not (
        strategy.zero.emulate is None or strategy.zero.emulate.sums_copies
    ):
        takers = [name for name, each in runtimes().items() if each.options.sums_copies]
        name = type(strategy.zero.emulate).__name__
        raise ModelError(
            f"model.qk_norm: {name} sums no gradients of {min(model.summed_copies)} over tensor "
            f"{model.tensor}; say parallel.tensor 1, or zero.emulate {', '.join(takers)} or none"
        )
    _need_groups(model, strategy)
    if (need := runtime_of(strategy).need) is not None:
        need(model, strategy)


def _need_groups(model: Model, strategy: Strategy) -> None:
    names = [parameter.name for parameter in model.parameters]
    for pattern in (each for group in strategy.train.groups for each in group.parameters):
        if not fnmatch.filter(names, pattern):
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ModelError(f"train.group: {pattern!r} is no parameter; there are {some}")


def wire_bytes(model: Model, strategy: Strategy) -> tuple[WireBytes, ...]:
    """Return the bytes that a rank sends in a step by closed form, by group and collective.

    Raises:
        ModelError: the units do not fill the pipeline stages.
    """
    volume = runtime_of(strategy).volume(strategy)
    return closed_form.wire_bytes(model, strategy, volume)


def copied_bytes(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return by closed form the bytes that a rank copies on its device in a step, at least."""
    copied = runtime_of(strategy).volume(strategy).copied
    return CopiedBytes() if copied is None else copied(model, strategy)


def host_bytes(model: Model, strategy: Strategy) -> tuple[HostBytes, ...]:
    """Return by closed form the bytes a rank copies to and from its host in a step, by role.

    Raises:
        ModelError: the units do not fill the pipeline stages.
    """
    return closed_form.host_bytes(model, strategy, runtime_of(strategy).volume(strategy))


def file_bytes(model: Model, strategy: Strategy) -> FileBytes | None:
    """Return by closed form the bytes that a rank reads and writes in files in a step."""
    return closed_form.file_bytes(model, strategy, runtime_of(strategy).volume(strategy))
