"""Check foreign code around a torch optimizer whose work a schedule does: steps, hooks, state.

A schedule updates parameters and holds moments. The optimizer's `step` is called without
parameters, for learning rate schedulers. Other code that runs there or reads the state would find
nothing.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from zsim.backend.backend import RefusedError
from zsim_torch.execute.run_state import has_lost_moments
from zsim_torch.module.absent import is_absent

OBSERVERS: Final = ("torch.profiler", "zsim_record.record.recording", __name__)
"""Modules whose step hooks do not need parameters."""


_STATE_HOOKS: Final = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Tables of state hooks, which checkpoints of a training do not call."""


def _hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., object]]:
    """Return the hooks of a step of `optimizer`."""
    tables = (
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,  # pyright: ignore[reportPrivateUsage]
        optimizer._optimizer_step_post_hooks,  # pyright: ignore[reportPrivateUsage]
    )
    return [hook for table in tables for hook in table.values()]


def is_seen(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a `step` is observed: by a scheduler that has wrapped it, or by a hook."""
    return "step" in vars(optimizer) or bool(_hooks(optimizer))


def need_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise RefusedError unless `step` is the class's or a scheduler's, and hooks only observe.

    A hook that works on parameters would find none.
    """
    own = vars(optimizer).get("step")
    # Schedulers of torch wrap the step, to check that it is called before theirs.
    scheduled = hasattr(own, "_wrapped_by_lr_sched")
    if own is not None and not (
        scheduled and getattr(own, "__wrapped__", None) is type(optimizer).step
    ):
        raise RefusedError(
            "optimizer: its step is replaced, and a schedule never calls it; give the optimizer as "
            "torch has it"
        )
    around = [hook for table in _STATE_HOOKS for hook in vars(optimizer)[table].values()]
    for hook in (*_hooks(optimizer), *around):
        if getattr(hook, "__module__", None) not in OBSERVERS:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise RefusedError(
                f"optimizer: its hook {name} would find no parameters or state, which the schedule "
                "has; remove it, and call it after trainer.step or as on_step"
            )


def guard_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to save, load or use the state of `optimizer` during and after a schedule's run."""
    hooks = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
    if _need_moments not in hooks.values():
        optimizer.register_state_dict_pre_hook(_need_state)
        optimizer.register_load_state_dict_pre_hook(_need_state)
        optimizer.register_step_pre_hook(_need_moments)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _need_state(optimizer: torch.optim.Optimizer, *loaded: object) -> None:
    """Raise RefusedError if a schedule has the state of `optimizer`, or its training has ended.

    With `loaded`, the optimizer gets a new state, so an ended training is allowed.
    """
    if any(map(is_absent, _parameters(optimizer))):
        raise RefusedError(
            "optimizer: the schedule has its state; save and load it with trainer.save and "
            "trainer.load, or trainer.state_dict"
        )
    if not loaded:
        _need_moments(optimizer)


def _need_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401  (torch's)
    """Raise RefusedError if the optimizer's moments were lost at the end of a training."""
    lost = [each for each in _parameters(optimizer) if has_lost_moments(each)]
    if lost and not any(optimizer.state.get(each) for each in lost):
        raise RefusedError(
            "optimizer: its moments have ended with the training; save them before the end with "
            "trainer.save, and make another optimizer to begin them anew"
        )
