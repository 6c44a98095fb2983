"""Determine the tensors that a torch operator reads and writes, from its schema."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ALLOCATES_ONLY = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
"""Operators that return memory that no kernel wrote."""
TOUCHES_NOTHING = frozenset(
    {
        "aten::is_pinned",
        "aten::is_same_size",
        "aten::lift_fresh",
        "aten::record_stream",
        "aten::resize_",
        "aten::set_",
        "aten::size",
        "aten::stride",
        "aten::sym_numel",
        "aten::sym_size",
        "aten::sym_storage_offset",
        "aten::sym_stride",
        "aten::_has_compatible_shallow_copy_type",
        "aten::_unsafe_view",
        "prim::device",
    }
)
"""Operators that only use sizes, devices and storages."""
SHAPE_ALONE = frozenset(
    {
        "aten::full_like",
        "aten::ones_like",
        "aten::rand_like",
        "aten::randn_like",
        "aten::zeros_like",
        "aten::new_full",
        "aten::new_ones",
        "aten::new_zeros",
    }
)
"""Operators that only use the shape of their argument."""
COPIES_IN = "fsdp::all_gather_copy_in"
"""FSDP2's copy into this rank's slot of an all-gather.

Its schema shows neither that it writes its second argument, nor that its results, the slot and the
whole, are views of that argument.
"""
OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
"""Operators that write their first argument without reading it."""


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """Tensors that an operator reads and writes: arguments by position and name, and results."""

    name: str
    is_silent: bool
    """True if the operator touches no memory."""
    reads: tuple[tuple[int, str], ...]
    writes: tuple[tuple[int, str], ...]
    returns_new: bool

    def read_tensors(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[torch.Tensor]:
        """Yield the tensors that the operator reads."""
        for each in self.reads:
            yield from tensors_in(_argument(each, args, kwargs))

    def made_tensors(self, result: object) -> list[torch.Tensor]:
        """Return the tensors of the result that the operator writes."""
        made = list(tensors_in(result)) if self.returns_new else []
        return made[:1] if self.name == COPIES_IN else made

    def written_tensors(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[torch.Tensor]:
        """Yield the tensors that the operator writes in place."""
        for each in self.writes:
            yield from tensors_in(_argument(each, args, kwargs))


@cache
def access_of(operator: torch._ops.OpOverload) -> OperatorAccess:
    """Return the reads and writes of `operator`."""
    schema = operator._schema
    name = schema.name
    places = [
        (number, argument)
        for number, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    ]
    written = tuple(
        (number, argument.name)
        for number, argument in places
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    is_view = (
        bool(schema.returns)
        and not written
        and all(returned.alias_info is not None for returned in schema.returns)
    )
    returns_new = name not in ALLOCATES_ONLY and any(
        "Tensor" in str(returned.type) and returned.alias_info is None
        for returned in schema.returns
    )
    reads: tuple[tuple[int, str], ...] = ()
    if name not in SHAPE_ALONE | ALLOCATES_ONLY:
        reads = tuple(
            (number, argument.name)
            for number, argument in places
            if not (argument.alias_info is not None and argument.alias_info.is_write)
            or (name not in OVERWRITES and argument.name != "out")
        )
    if name == COPIES_IN:
        reads = reads[:1]
    is_silent = is_view or name in TOUCHES_NOTHING or name.startswith("prim::")
    return OperatorAccess(name, is_silent, reads, written, returns_new)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument or a result: the value itself, or items of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        items: Iterable[object] = value
        for each in items:
            yield from tensors_in(each)


def _argument(place: tuple[int, str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    number, name = place
    return args[number] if number < len(args) else kwargs.get(name)
