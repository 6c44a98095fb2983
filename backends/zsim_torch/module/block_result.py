"""Results of a block's first call, which plan its later calls and are checked against them."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from zsim_torch.module.unit import ModuleUnitError

PLAIN: Final = (
    str, bytes, int, float, complex, bool, type(None), type(Ellipsis), slice, range, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, Enum, type,
)  # fmt: skip
"""Types of values without tensors."""


@dataclass(frozen=True, slots=True)
class AliasLeaf:
    """A result of a block that is one of its arguments, by its number."""

    argument: int

    def __str__(self) -> str:
        return f"its argument {self.argument}"


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A result of a block that is a new tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return "a new tensor"


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """A result of a block that is not a tensor."""

    value: object

    def __str__(self) -> str:
        return f"{self.value!r:.60}"


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The structure of all results of a call of a block, without values of tensors."""

    path: str
    leaves: tuple[AliasLeaf | TensorLeaf | ConstantLeaf, ...]
    spec: TreeSpec

    def need(self, found: Sequence[object], given: Sequence[object]) -> None:
        """Raise ModuleUnitError unless a later call on `given` has returned the same structure.

        Only values of tensors may differ.
        """
        for leaf, each in zip(self.leaves, found, strict=False):
            match leaf:
                case AliasLeaf():
                    same = each is given[leaf.argument]
                case ConstantLeaf():
                    same = not isinstance(each, Tensor)
                    same = same and (not isinstance(each, PLAIN) or each == leaf.value)
                case TensorLeaf():
                    same = isinstance(each, Tensor)
            if not same:
                found_here = _in_words(each, given)
                raise ModuleUnitError(
                    f"unit {self.path}: returned {found_here}, the first time {leaf}; only values "
                    "of tensors may change (does chance decide? multiply by 0 or 1 instead)"
                )
        if len(found) != len(self.leaves):
            raise ModuleUnitError(
                f"unit {self.path}: returned {len(found)} values, the first time {len(self.leaves)}"
            )


def _in_words(found: object, given: Sequence[object]) -> str:
    """Describe a value that a block has returned, in the terms of a leaf of its result."""
    if not isinstance(found, Tensor):
        return f"{found!r:.60}"
    place = next((number for number, each in enumerate(given) if each is found), None)
    return "a new tensor" if place is None else f"its argument {place}"


def need_same_arguments(path: str, given: Sequence[object], after: object) -> None:
    """Raise ModuleUnitError if a block has changed a container that it was called with."""
    found = tree_leaves(after)
    if len(found) != len(given) or any(
        one is not other for one, other in zip(given, found, strict=True)
    ):
        raise ModuleUnitError(
            f"unit {path}: it changes a list or dict that it is called with; return what it makes "
            "instead"
        )


def described(
    path: str, given: Sequence[object], output: object
) -> tuple[BlockResult, dict[int, Tensor]]:
    """Return the structure of a block's result, and its new tensors by their index."""
    for each in (*given, *tree_leaves(output)):
        _need_stateless(path, each)
    numbers = {id(each): number for number, each in enumerate(given) if isinstance(each, Tensor)}
    found, shape = tree_flatten(output)
    made: list[AliasLeaf | TensorLeaf | ConstantLeaf] = []
    fresh: dict[int, Tensor] = {}
    for index, each in enumerate(found):
        if not isinstance(each, Tensor):
            made.append(ConstantLeaf(each))
        elif id(each) in numbers:
            made.append(AliasLeaf(numbers[id(each)]))
        else:
            made.append(TensorLeaf(each.shape, each.dtype, each.requires_grad))
            fresh[index] = cut(each)
    return BlockResult(path, tuple(made), shape), fresh


def cut(tensor: Tensor) -> Tensor:
    """Return a detached copy of `tensor` that may be written in place; keeps requires_grad."""
    cut = tensor.detach()
    return cut.requires_grad_().clone() if tensor.requires_grad else cut


def empty(leaf: TensorLeaf) -> Tensor:
    """Return a tensor on "meta" that stands for one that a block returns."""
    made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return made.requires_grad_().clone() if leaf.requires_grad else made


def _need_stateless(path: str, leaf: object) -> None:
    """Raise ModuleUnitError if `leaf`, passed to or returned by a block, contains tensors.

    Tensors themselves, and containers that zsim follows, are allowed.
    """
    if isinstance(leaf, Tensor | nn.Module):
        return
    if next(_tensors(leaf, depth=4), None) is not None:
        raise ModuleUnitError(
            f"unit {path}: it is called with, or returns, a {type(leaf).__name__} that keeps "
            "tensors; zsim follows tensors in lists, tuples and dicts (for a cache of keys and "
            "values say use_cache=False)"
        )


def _tensors(value: object, *, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in attributes of an object and in their containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, PLAIN) and not callable(value):
        if isinstance(value, dict):
            inner: Iterable[object] = value.values()
        elif isinstance(value, list | tuple | set):
            inner = value
        else:
            inner = getattr(value, "__dict__", {}).values()
        for each in inner:
            yield from _tensors(each, depth=depth - 1)


@contextmanager
def called_instead(block: nn.Module, instead: Callable[..., object] | None) -> Generator[None]:
    """Return a context in which `instead` is called for `block`; the block itself if None."""
    # torch.compile uses the same attribute to replace a module's call.
    name = "_compiled_call_impl"
    before = block.__dict__.get(name)
    block.__dict__[name] = instead
    try:
        yield
    finally:
        if before is None:
            del block.__dict__[name]
        else:
            block.__dict__[name] = before


def name_of(func: object) -> str:
    """Return the name of a function of torch."""
    return str(getattr(func, "__name__", func))


def only_reads_metadata(func: object, result: object) -> bool:
    """Return True if a call has only returned a number, data type or similar, not a hook handle."""
    made = [] if isinstance(result, Tensor) else tree_leaves(result)
    told = result is not None or name_of(func) == "__get__"
    return told and not isinstance(result, Tensor) and all(isinstance(x, PLAIN) for x in made)
