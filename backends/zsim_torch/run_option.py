"""Settings of a run on one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zsim.backend.backend import RefusedError
from zsim.schedule.schedule import Schedule
from zsim_torch.initial_values import InitialValues

Given = Mapping[str, Callable[[int], float]]
"""Functions from the step number, counted from 0, to the value of a host scalar, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Settings of a run on one rank.

    Attributes:
        device: device of the rank. Default: the module's device if it is a GPU, else the current
            GPU if the process group has NCCL for it, else the CPU.
        initial: initial values: a function from a parameter's name to its value, an `Initializer`,
            or the path of a checkpoint or of a file or folder of safetensors, with all parameters
            of the module, optionally its buffers, and nothing else. Default: the values of the
            module. Required for a module on "meta"; no rank holds more than its shard and one unit
            at a time.
        observe: watch live storages and collectives; slows down each operator.
        witness: record the operators that torch runs (`zsim.trace.witness`); slows down each one.
        poison: fill freed and not yet valid memory with NaN, and delay operations at random.
        write_back: leave the trained parameters in the module at the end, unless it is on "meta".
            Otherwise the module keeps none, and reading them raises an error. If setup or the first
            step raises, the module gets its initial parameters back; host memory holds them until
            then.
        keep_trace: keep the events of every step for `trace`; memory grows with the steps.
        given: functions from the step number, counted from 0, to the value of a host scalar, such
            as a learning rate, by its name. Default: the strategy's learning rates, if it has any.
        journal: file that gets the loss of each step after the step; on a GPU one step later, so
            that the host does not wait.
        offload_path: folder of the files that stand for NVMe; default: the temporary folder.
        device_budget: limit of live bytes, excluding host memory pools; None for no limit.
        restart: allow moments and loss scale to start anew although an earlier run has trained the
            module; they are not kept between runs.
    """

    device: torch.device | None = None
    initial: InitialValues | None = None
    observe: bool = False
    witness: bool = False
    poison: bool = False
    write_back: bool = True
    keep_trace: bool = False
    given: Given = field(default_factory=dict[str, Callable[[int], float]])
    journal: Path | None = None
    offload_path: Path | None = None
    device_budget: int | None = None
    restart: bool = False


def given_in(schedule: Schedule, option: Option, known: Given) -> Given:
    """Return functions for all given host scalars: from `option`, the strategy or `known`.

    The first of the three that has a function for a scalar provides it.

    Raises:
        RefusedError: a scalar has no function.
    """
    found = {**known, **given_by_strategy(schedule), **option.given}
    wanted = [scalar.name for scalar in schedule.scalars if scalar.given]
    if missing := [name for name in wanted if name not in found]:
        raise RefusedError(f"given: {missing[0]}: missing; its number for each step is needed")
    return {name: found[name] for name in wanted}


def given_by_strategy(schedule: Schedule) -> Given:
    """Return the learning rates of the contract's strategy, by host scalar."""
    strategy = schedule.contract.strategy
    if strategy is None or strategy.train.learning_rates is None:
        return {}
    rate = strategy.train.optimizer.learning_rate
    return {rate: strategy.train.learning_rates.at} if isinstance(rate, str) else {}
