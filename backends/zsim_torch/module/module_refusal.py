"""Refuse modules and optimizers that zsim would train differently from plain torch."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from zsim.backend.backend import RefusedError

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Private tables in which torch stores hooks."""


def need_trainable(module: object) -> None:
    """Raise RefusedError unless a schedule can hold the parameters of `module`."""
    if not isinstance(module, nn.Module):
        raise RefusedError(f"module: a {type(module).__name__} must be a torch.nn.Module")
    if isinstance(vars(module).get("_modules", {}).get("_orig_mod"), nn.Module):
        raise RefusedError(
            "module: torch.compile has wrapped it whole, and a schedule acts between its units; "
            "compile its blocks in place: block.compile()"
        )
    for name, each in module.named_parameters():
        _need_parameter(name, each)
    for path, each in module.named_modules():
        if getattr(each, "sparse", False) is True and isinstance(
            each, nn.Embedding | nn.EmbeddingBag
        ):
            raise RefusedError(
                f"module {path}: its gradients are sparse, a schedule's are dense; say sparse=False"
            )


def need_trained(module: nn.Module) -> None:
    """Raise RefusedError unless `module` has a trained parameter, which every schedule needs."""
    if not any(each.requires_grad for each in module.parameters()):
        raise RefusedError("module: it has no parameter that is trained (requires_grad)")


def _need_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise RefusedError unless a schedule can hold `parameter`."""
    if isinstance(parameter, UninitializedParameter):
        raise RefusedError(
            f"parameter {name}: it has no shape yet (a lazy module); call the module once before"
        )
    if not parameter.is_floating_point():
        dtype = str(parameter.dtype).removeprefix("torch.")
        instead = "torch.view_as_real" if parameter.is_complex() else "a buffer"
        raise RefusedError(
            f"parameter {name}: {dtype} must be a format of real floats; keep it as {instead}"
        )
    if any(getattr(parameter, each, None) for each in _PARAMETER_HOOKS):
        raise RefusedError(
            f"parameter {name}: it has a hook for its gradient, which comes to it in no schedule; "
            "put the hook on what its module returns"
        )


def need_no_hooks(module: nn.Module, units: Iterable[nn.Module], *, forward_is_run: bool) -> None:
    """Raise RefusedError if a module outside `units` has hooks that would not be called.

    Backward hooks are called inside units only. Forward hooks are called outside units, too, if the
    forward of the whole module is run.
    """
    inside = {id(part) for unit in units for part in unit.modules()}
    tables = _BACKWARD_HOOKS if forward_is_run else (*_BACKWARD_HOOKS, *_FORWARD_HOOKS)
    for path, each in module.named_modules():
        found = [table for table in tables if id(each) not in inside and vars(each).get(table)]
        if found:
            kind = "backward" if found[0] in _BACKWARD_HOOKS else "forward"
            where = f"module {path}" if path else "module"
            raise RefusedError(
                f"{where}: it has a {kind} hook, which is called inside units alone; its units "
                "are parts of it"
            )


def need_no_moments(optimizer: object, *, may_restart: bool) -> None:
    """Raise RefusedError if a torch optimizer has state, unless it may restart."""
    if may_restart or not isinstance(optimizer, torch.optim.Optimizer):
        return
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor | int | float) and bool(torch.as_tensor(value).any()):
                raise RefusedError(
                    f"optimizer: it has {key} of an earlier training, which would begin anew; load "
                    "a checkpoint that has it, or say Option(restart=True)"
                )
