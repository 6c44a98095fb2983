"""Settings of a run on one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zsim.backend.backend import RefusedError
from zsim.schedule.schedule import Schedule
from zsim_torch.initial_values import InitialValues

Given = Mapping[str, Callable[[int], float]]
"""By host scalar what the caller gives in it before a step, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Settings of a run on one rank.

    Attributes:
        device: where the rank computes; by default where the module is if that is a GPU, or the
            current GPU if the process group has NCCL for it, else the CPU.
        initial: the initial value of a parameter, by name; or an `Initializer`, with which modules
            make their own; or the path of a checkpoint, or of a folder or file of safetensors, with
            all parameters of the module, its buffers or some, and nothing else. By default what
            the module holds. A module on "meta" needs one; no rank ever holds more of it than its
            part and one unit.
        observe: watch live storages and collectives; each operator takes longer.
        witness: record what torch is seen to do (`zsim.trace.witness`); each operator takes longer.
        poison: fill freed and not yet valid memory with what is no number, and run late at random.
        write_back: the module ends with the trained parameters, unless it is on "meta"; else it
            keeps none, and to read them is refused. If setup or the first step raises, it has those
            that it came with; they stay in host memory until then.
        keep_trace: keep what ran and when in every step, for `trace`; memory grows with the steps.
        given: by name of a host scalar what the caller gives in it before each step, counted from
            0: a learning rate. By default the strategy's learning rates, if it says some.
        journal: a file that gets the loss of each step when it has ended; on a GPU a step later, so
            that the host need not wait.
        offload_path: folder of the files that stand for NVMe; by default that of temporary files.
        device_budget: bytes that may live at a time, but for pools of host memory; None for any.
        restart: moments and loss scale may begin anew although an earlier run has trained the
            module; they are not kept from one run to another.
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
    """Return what is given in each host scalar that asks for it: by `option`, or else as `known`.

    Raises:
        RefusedError: nobody says what is given in one of them.
    """
    found = {**known, **given_by_strategy(schedule), **option.given}
    wanted = [scalar.name for scalar in schedule.scalars if scalar.given]
    if missing := [name for name in wanted if name not in found]:
        raise RefusedError(f"given: {missing[0]}: missing; its number for each step is needed")
    return {name: found[name] for name in wanted}


def given_by_strategy(schedule: Schedule) -> Given:
    """Return the learning rates that the contract's strategy says, by host scalar."""
    strategy = schedule.contract.strategy
    if strategy is None or strategy.train.learning_rates is None:
        return {}
    rate = strategy.train.optimizer.learning_rate
    return {rate: strategy.train.learning_rates.at} if isinstance(rate, str) else {}
