"""Read, compare and restore the states of single Python objects."""

import itertools
import random
import types
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from zsim_torch.module.block_result import PLAIN
from zsim_torch.module.saving import version
from zsim_torch.module.tensor_values import has_values

SMALL: Final = 2**16
"""Maximum elements of a tensor whose values are compared; larger ones by version, unless copied."""

_OF_TORCH: Final = frozenset([*vars(nn.Module()), "_compiled_call_impl"]) - {"training"}
"""Attributes of modules that belong to torch: tables of parameters, submodules and hooks."""

_Read = Callable[[], dict[str, object]]
_Put = Callable[[str, dict[str, object]], object]


@dataclass(slots=True, eq=False)
class CopiedTensor:
    """Copied values of a tensor; None if only its version was kept."""

    tensor: torch.Tensor
    values: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, *, whole: bool) -> "CopiedTensor":
        """Copy a tensor if it is small, or if `whole` is True."""
        can = has_values(tensor)
        with torch.no_grad():
            values = tensor.detach().clone() if can and (whole or tensor.numel() <= SMALL) else None
        return cls(tensor, values, 0 if tensor.is_inference() else version(tensor))

    def equals(self, other: "CopiedTensor") -> bool:
        """Return True if both are bitwise equal; without values, if their versions are equal."""
        if self.values is None or other.values is None:
            return self.version == other.version
        one, two = (each.contiguous().reshape(-1) for each in (self.values, other.values))
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        return torch.equal(one.view(torch.uint8), two.view(torch.uint8))

    def put(self) -> None:
        """Write the values back."""
        if self.values is not None:
            with torch.no_grad():
                self.tensor.copy_(self.values)


def same(one: object, other: object) -> bool:
    """Return True if two states are equal: the same object, or plain values that are equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, CopiedTensor) and isinstance(other, CopiedTensor):
        return one.equals(other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.tobytes() == other.tobytes()
    return isinstance(one, PLAIN) and bool(one == other or repr(one) == repr(other) == "nan")


def put_items(holder: Any, items: list[Any]) -> None:  # noqa: ANN401  (any object of a user)
    """Replace the members of a container by `items`."""
    if isinstance(holder, array):
        del holder[:]
    else:
        holder.clear()
    (holder.update if isinstance(holder, dict | set) else holder.extend)(items)


def instance_table(owner: Any) -> tuple[_Read, _Put]:  # noqa: ANN401  (any object of a user)
    """Return functions that read and restore attributes of an object, slots included.

    Buffers of a module are attributes, too.
    """
    tables = [vars(owner)] if hasattr(owner, "__dict__") else []
    buffers = [tables[0]["_buffers"]] if tables and "_buffers" in tables[0] else []
    slots = [*_slots(type(owner))]

    def read() -> dict[str, object]:
        found = {key: getattr(owner, key) for key in slots if hasattr(owner, key)}
        for table in (*tables, *buffers):
            found |= table
        return {key: each for key, each in found.items() if key not in _OF_TORCH}

    def put(key: str, before: dict[str, object]) -> None:
        if key in slots:
            object.__setattr__(owner, key, before[key])
            return
        places = [table for table in (*buffers, *tables) if key in table] or tables
        _put_key(places[0], key, before)

    return read, put


def class_table(cls: type) -> tuple[_Read, _Put]:
    """Return functions that read and restore the data of a class."""

    def read() -> dict[str, object]:
        return {
            key: each
            for key, each in vars(cls).items()
            if not key.startswith("__") and not callable(each) and not hasattr(each, "__get__")
        }

    def put(key: str, before: dict[str, object]) -> None:
        if key in before:
            setattr(cls, key, before[key])
        else:
            delattr(cls, key)

    return read, put


def globals_table(known: dict[str, object], names: set[str]) -> tuple[_Read, _Put]:
    """Return functions that read and restore the globals `names`, a set that may grow."""

    def read() -> dict[str, object]:
        return {key: known[key] for key in names & known.keys()}

    return read, partial(_put_key, known)


def generator_state(value: Any) -> tuple[Callable[[], object], Callable[[Any], object]] | None:  # noqa: ANN401  (any object of a user)
    """Return functions that read and restore a generator, an array or a context variable."""
    if isinstance(value, ContextVar):
        return partial(value.get, None), value.set
    if isinstance(value, torch.Generator):
        read = value.get_state
        return (lambda: read().numpy().copy()), lambda state: value.set_state(
            torch.from_numpy(state.copy())
        )
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return (lambda: repr(bits.state)), partial(_put_bits, bits, bits.state)
    if isinstance(value, np.random.RandomState):
        return (lambda: repr(value.get_state())), partial(_put_numpy, value, value.get_state())
    if isinstance(value, np.ndarray):
        return value.copy, partial(np.copyto, value)
    return None


def progress(iterator: Any) -> object:  # noqa: ANN401  (any object of a user)
    """Return the position of an iterator, or None if it is unknown."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    with warnings.catch_warnings(), suppress(TypeError):
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, from Python 3.12 on
        return iterator.__reduce__()[1:]
    return None


def _put_bits(bits: Any, state: Any, _: object) -> None:  # noqa: ANN401  (any object of a user)
    bits.state = state


def _put_numpy(value: np.random.RandomState, state: Any, _: object) -> None:  # noqa: ANN401  (any object of a user)
    value.set_state(state)


def _put_key(table: dict[str, object], key: str, before: Mapping[str, object]) -> None:
    if key in before:
        table[key] = before[key]
    else:
        table.pop(key, None)


def _slots(cls: type) -> Iterator[str]:
    for each in cls.__mro__:
        named = vars(each).get("__slots__", ())
        yield from (
            key for key in ((named,) if isinstance(named, str) else named) if key[:2] != "__"
        )


def names_of(code: types.CodeType, *, with_strings: bool = False) -> Iterator[str]:
    """Yield names of globals and attributes in `code`, and in functions that it makes.

    With strings, those are yielded too: `getattr` reads an attribute by a string.
    """
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from names_of(each, with_strings=with_strings)
        elif with_strings and isinstance(each, str):
            yield each
