"""Find the experts of a user's module, and the blocks around them.

Experts are a module with stacked matrices, one for each expert, whose forward takes tokens, the
chosen experts and their weights, as in transformers 5 (`MixtralExperts` and others of
`use_experts_implementation`).
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from zsim_torch.module.repeated_blocks import blocks_of

ARGUMENTS: Final = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of the forward of experts: tokens, and experts and weights by token and choice."""

STACKED: Final = 3
"""Dimensions of stacked matrices."""


def are_experts(module: nn.Module) -> bool:
    """Return True if `module` has stacked matrices of experts, and takes their arguments."""
    own = [*module.parameters(recurse=False)]
    if not any(each.dim() == STACKED for each in own) or len({len(each) for each in own}) > 1:
        return False
    return tuple(inspect.signature(module.forward).parameters)[: len(ARGUMENTS)] == ARGUMENTS


def count_of(experts: nn.Module) -> int:
    """Return the number of experts in a module of experts."""
    return len(next(experts.parameters(recurse=False)))


def experts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return all experts in `module` by path."""
    return {path: each for path, each in module.named_modules() if are_experts(each)}


def blocks_around(module: nn.Module) -> dict[str, nn.Module]:
    """Return blocks of `module` by path; a block with experts is replaced by parts of it.

    The parts are the experts, and other modules with submodules, such as attention. The module's
    own forward runs the rest, such as routers, norms and residual sums.
    """
    found: dict[str, nn.Module] = {}
    for path, block in blocks_of(module).items():
        if any(are_experts(each) for each in block.modules()):
            found |= dict(_parts(path, block))
        else:
            found[path] = block
    return found


def _parts(path: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if are_experts(block):
        yield path, block
        return
    for name, each in block.named_children():
        if any(are_experts(part) for part in each.modules()):
            yield from _parts(f"{path}.{name}", each)
        elif any(True for _ in each.children()) and any(True for _ in each.parameters()):
            yield f"{path}.{name}", each


def arguments_of(
    experts: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Return tokens, chosen experts and weights of a call of `experts`."""
    given = inspect.signature(experts.forward).bind(*args, **kwargs).arguments
    tokens, chosen, weights = (given[name] for name in ARGUMENTS)
    return tokens, chosen, weights


def own_part(experts: nn.Module, held: int) -> nn.Module:
    """Return a module that runs as `experts` does, with `held` of them on the device "meta".

    Numbers in it that equal the number of experts, and are named so, become `held`.
    """
    count, part = count_of(experts), copy.copy(experts)
    for key, value in vars(experts).items():
        if "experts" in key and type(value) is int and value == count:
            setattr(part, key, held)
    vars(part)["_parameters"] = {
        name: nn.Parameter(
            torch.empty(held, *each.shape[1:], dtype=each.dtype, device="meta"),
            requires_grad=each.requires_grad,
        )
        for name, each in experts.named_parameters(recurse=False)
    }
    return part
