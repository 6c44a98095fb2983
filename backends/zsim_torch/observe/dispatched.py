"""Interpret arguments of torch's operators: tensors read and written, groups, peers, reductions."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from zsim.strategy.optimizer_rule import Optimizer
from zsim.trace.witness import Region
from zsim_torch.observe.observer import tensors_in

REDUCTION: Final = {0: "sum", 1: "average", 4: "max"}
"""Names of `ReduceOp.RedOpType` values that operators of torch.distributed can take."""

OVERWRITES: Final = frozenset(["copy_", "fill_", "zero_", "normal_", "uniform_"])
"""Operators that write their first argument without reading it."""

FUSED_UPDATES: Final = frozenset(rule.fused for rule in Optimizer.kinds() if rule.fused)
"""Optimizers in one operator. Their schemas mark gradients as written, for a `grad_scale`."""

ROWS_MAX: Final = 1 << 12
"""Maximum number of rows recorded one by one; larger tensors count from first to last byte."""

KIND: Final = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
"""Operators of torch.distributed, and the names of their collectives in traces."""


class Sides(NamedTuple):
    """Arguments that an operator reads and writes, by position in its schema."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@cache
def sides_of(func: Any) -> Sides:  # noqa: ANN401  (an operator: torch names no type for it)
    """Return the arguments that `func` reads and writes; none for a view."""
    name = func._schema.name.partition("::")[2]
    reads: list[int] = []
    writes: list[int] = []
    for place, argument in enumerate(func._schema.arguments):
        is_gradient = name in FUSED_UPDATES and argument.name == "grads"
        if argument.alias_info is not None and argument.alias_info.is_write and not is_gradient:
            writes.append(place)
            if name not in OVERWRITES and not argument.is_out:
                reads.append(place)
        else:
            reads.append(place)
    returned = [each.alias_info for each in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    if is_view or name.startswith(("new_", "_unsafe_view")) or name.endswith("_like"):
        return Sides((), ())
    return Sides(tuple(reads), tuple(writes))


@cache
def is_fused_update(func: Any) -> bool:  # noqa: ANN401  (an operator: torch names no type for it)
    """Return True if `func` is an optimizer in one operator."""
    return func._schema.name.partition("::")[2] in FUSED_UPDATES


def pairs(
    operator: str, args: tuple[Any, ...]
) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Yield pairs of read and written tensors of an operator of torch.distributed."""
    kind = KIND.get(operator)
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        targets, sources = tensors_in(args[0]), tensors_in(args[1])
        yield from zip(sources, targets, strict=True)
        return
    for tensor in tensors_in(args[0]):
        yield (
            None if kind == "receive" else tensor,
            None if kind == "send" else tensor,
        )


def is_even(operator: str, args: tuple[Any, ...]) -> bool:
    """Return False for an all-to-all with explicit sizes of its blocks."""
    return KIND.get(operator) != "all_to_all" or not any(args[3:5])


def scripted(value: object) -> Iterator[Any]:
    """Yield the C++ objects in `value`: process groups, reductions and work objects."""
    if isinstance(value, torch.ScriptObject):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from scripted(item)


def reduction_of(args: tuple[Any, ...]) -> str:
    """Return the name of the reduction of an operator of torch.distributed, or an empty string."""
    for each in scripted(args):
        if "ReduceOp" in str(each._type()):
            number = int(each.op())
            return REDUCTION.get(number, f"reduction {number}")
    return ""


def peer_of(operator: str, args: tuple[Any, ...], ranks: tuple[int, ...]) -> int | None:
    """Return the global rank of the root or peer, or None.

    The first integer argument is its rank in the group.
    """
    if KIND.get(operator) not in ("broadcast", "send", "receive"):
        return None
    return ranks[next(each for each in args if type(each) is int)]


def by_place(
    func: Any,  # noqa: ANN401  (an operator: torch names no type for it)
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> dict[int, Any]:
    """Return all arguments by position in the schema."""
    values: dict[int, Any] = dict(enumerate(args))
    if named:
        for place, argument in enumerate(func._schema.arguments):
            if argument.name in named:
                values[place] = named[argument.name]
    return values


def regions_of(number: int, tensor: torch.Tensor) -> Iterator[Region]:
    """Yield the byte regions of `tensor`: one if it is dense, else one per row, in order."""
    size = tensor.element_size()
    if tensor.is_contiguous():
        if tensor.numel():
            yield number, int(tensor.storage_offset()) * size, tensor.numel() * size
        return
    start, run = int(tensor.storage_offset()), 1
    outer: list[tuple[int, int]] = []
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count == 0:
            return
        if count == 1 or stride == 0:
            continue
        if stride <= run and not outer:  # overlapping windows count once
            run = stride * (count - 1) + run
        else:
            outer.append((stride, count))
    starts = [start]
    for stride, count in outer:
        if len(starts) * count > ROWS_MAX:
            last = start + sum(stride * (count - 1) for stride, count in outer)
            starts, run = [start], last + run - start
            break
        starts = [first + stride * index for index in range(count) for first in starts]
    for first in starts:
        yield number, first * size, run * size
