"""Python objects that modules keep from call to call: attributes, containers, globals, generators.

Forwards that only measure must leave them unchanged. Objects are followed from modules, and from
functions to the globals, cells, defaults and attributes of imported files that they name. Objects
of torch, numpy and the standard library are skipped, except containers, namespaces, tensors, arrays
and generators of numbers.
"""

import itertools
import sys
import types
from argparse import Namespace
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from threading import local
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zsim_torch.module.block_result import PLAIN
from zsim_torch.module.object_state import (
    CopiedTensor,
    class_table,
    generator_state,
    globals_table,
    instance_table,
    names_of,
    progress,
    put_items,
    same,
)
from zsim_torch.module.unit import ModuleUnitError

Location = tuple[int, str | None]
"""The id of an object with an attribute name, or the id of a dict with the key of a global."""

LONG: Final = 10_000
"""Maximum length of a container whose members are followed; longer ones are kept as a whole."""

FOREIGN: Final = frozenset(["torch", "numpy", "zsim", "zsim_torch", *sys.stdlib_module_names])
_ITERATORS: Final[tuple[type, ...]] = (
    types.GeneratorType, itertools.count, itertools.cycle, zip, map, filter, enumerate,
    type(iter(())), type(iter([])), type(iter(range(0))),
)  # fmt: skip
_INSTALLED: Final = "site-packages"
"""Part of the paths of installed packages; globals of their functions are not followed."""

_LEAVES: Final = (*PLAIN, types.ModuleType)
_CACHED: Final = type(lru_cache(repr))
_FUNCTIONS: Final = (partial, types.MethodType, types.FunctionType, _CACHED)
_CONTAINERS: Final = (dict, list, deque, set, bytearray, array)
_NAMESPACES: Final = (types.SimpleNamespace, Namespace, local, UserDict, UserList)
"""Objects of the standard library that keep a user's values as attributes."""


@dataclass(slots=True)
class _KeptTable:
    """Attributes or globals of `owner` at an earlier time; `put` restores one of them."""

    owner: object
    name: str
    read: Callable[[], dict[str, object]]
    put: Callable[[str, dict[str, object]], object]
    before: dict[str, object]

    def changed(self) -> Iterator[str]:
        """Yield the names of attributes that have changed since."""
        now = self.read()
        if len(now) == len(self.before) and all(now.get(k) is v for k, v in self.before.items()):
            return
        missing = object()
        for key in dict.fromkeys((*self.before, *now)):
            if not same(self.before.get(key, missing), now.get(key, missing)):
                yield key


@dataclass(slots=True)
class _KeptObject:
    """The content of `owner` at an earlier time; `put` is None if it cannot be restored."""

    owner: object
    name: str
    read: Callable[[], object]
    put: Callable[[Any], object] | None
    before: object

    def has_changed(self) -> bool:
        """Return True if the content has changed."""
        return not same(self.before, self.read())


@dataclass(slots=True)
class PythonState:
    """The state of all objects that modules and functions reach, at its creation.

    With `copies`, all values of tensors are kept, so that they can be restored.
    """

    copies: bool = True
    follows_modules: bool = True
    _tables: dict[int, _KeptTable] = field(default_factory=dict[int, _KeptTable])
    _objects: dict[int, _KeptObject] = field(default_factory=dict[int, _KeptObject])
    _named: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Names of globals, by the id of their table."""
    _imports: set[tuple[int, frozenset[str]]] = field(
        default_factory=set[tuple[int, frozenset[str]]]
    )
    """Files that functions with these names have imported."""
    _seen: dict[int, object] = field(default_factory=dict[int, object])

    @classmethod
    def of(
        cls, roots: Iterable[object], *, copies: bool = True, follows_modules: bool = True
    ) -> "PythonState":
        """Return the state of every object that `roots` reach."""
        made = cls(copies, follows_modules)
        made._follow((each, "") for each in roots)
        return made

    def _follow(self, found: Iterable[tuple[object, str]]) -> None:
        waiting = [*found]
        while waiting:
            value, name = waiting.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting += self._inside(value, name)

    @property
    def locations(self) -> set[Location]:
        """Return all locations that were reached."""
        found: set[Location] = {(number, None) for number in self._objects}
        for number, each in self._tables.items():
            found.update((number, key) for key in each.before)
        return found

    def reads(self, where: Location) -> bool:
        """Return True if a function that was reached may read a location that was reached.

        Attributes of an object of an installed package, such as a configuration that all layers
        share, are read by functions that have their names.
        """
        number, key = where
        table = self._tables.get(number)
        if table is None:
            return key is None and number in self._objects
        if key not in table.before or not _is_installed(type(table.owner)):
            return key in table.before
        functions = [each for each in self._seen.values() if isinstance(each, types.FunctionType)]
        return any(key in names_of(each.__code__, with_strings=True) for each in functions)

    def changed(self) -> dict[Location, str]:
        """Return the locations that have changed since, with their names."""
        found: dict[Location, str] = {}
        for number, table in self._tables.items():
            found |= {(number, key): f"{table.name}{key}" for key in table.changed()}
        for number, whole in self._objects.items():
            if whole.has_changed():
                found[number, None] = whole.name
        return found

    def advance(self) -> dict[Location, str]:
        """Return the locations that have changed since, and start again from the current state."""
        found = self.changed()
        for number, key in found:
            members: Iterable[object]
            if key is None:
                whole = self._objects[number]
                whole.before, name = whole.read(), whole.name
                members = tree_leaves(whole.before)
            else:
                table = self._tables[number]
                table.before, name = table.read(), table.name
                members = table.before.values()
            self._follow(_followed((each, name) for each in members))
        return found

    def restore(self) -> None:
        """Restore everything that has changed.

        Raises:
            ModuleUnitError: an iterator has advanced, which cannot be restored.
        """
        lost = ""
        for table in self._tables.values():
            for key in [*table.changed()]:
                table.put(key, table.before)
        for whole in self._objects.values():
            if whole.has_changed():
                if whole.put is None:
                    lost = whole.name
                else:
                    whole.put(whole.before)
        if lost:
            raise ModuleUnitError(
                f"module: its forward advances {lost}, an iterator that cannot be put back after "
                "the forwards that measure it; keep a number instead"
            )

    def _table(
        self,
        owner: object,
        name: str,
        read: Callable[[], dict[str, object]],
        put: Callable[[str, dict[str, object]], object],
    ) -> Iterator[tuple[object, str]]:
        before = read()
        self._tables[id(owner)] = _KeptTable(owner, name, read, put, before)
        yield from _followed((each, f"{name}{key}") for key, each in before.items())

    def _keep_object(
        self,
        value: object,
        name: str,
        read: Callable[[], object],
        put: Callable[[Any], object] | None,
    ) -> None:
        self._objects[id(value)] = _KeptObject(value, name, read, put, read())

    def _inside(self, value: Any, name: str) -> Iterator[tuple[object, str]]:  # noqa: ANN401  (any object of a user)
        """Keep the state of `value`, and yield the objects that it refers to."""
        if isinstance(value, nn.Module):
            if self.follows_modules:
                yield from self._of_module(value, name)
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                read = partial(CopiedTensor.of, value, whole=self.copies)
                self._keep_object(value, name, read, CopiedTensor.put)
        elif isinstance(value, _CONTAINERS):
            members: Any = value.items() if isinstance(value, dict) else value
            self._keep_object(value, name, partial(list, members), partial(put_items, value))
            if len(value) <= LONG and not isinstance(value, bytearray | array):
                members = [*value, *value.values()] if isinstance(value, dict) else value
                yield from _followed((each, name) for each in members)
        elif isinstance(value, tuple | frozenset):
            if len(value) <= LONG:
                yield from _followed((each, name) for each in value)
        elif (numbers := generator_state(value)) is not None:
            self._keep_object(value, name, *numbers)
        elif isinstance(value, _ITERATORS):
            self._keep_object(value, name, partial(progress, value), None)
            yield from _followed(
                (each, name) for each in tree_leaves(self._objects[id(value)].before)
            )
        elif isinstance(value, types.CellType):
            read_cell = partial(getattr, value, "cell_contents", None)
            self._keep_object(value, name, read_cell, partial(setattr, value, "cell_contents"))
            yield from _followed([(read_cell(), name)])
        elif isinstance(value, _FUNCTIONS):
            yield from self._of_function(value)
        elif isinstance(value, type):
            if not _is_foreign(value):
                yield from self._table(value, f"{value.__name__}.", *class_table(value))
        elif isinstance(value, _NAMESPACES) or (
            not isinstance(value, _LEAVES) and not _is_foreign(type(value))
        ):
            yield from self._table(value, f"{name}.", *instance_table(value))
            yield (type(value), "")

    def _of_module(self, module: nn.Module, name: str) -> Iterator[tuple[object, str]]:
        prefix = f"{name}." if name else ""
        yield from self._table(module, prefix, *instance_table(module))
        for key, each in module.named_children():
            yield (each, f"{prefix}{key}")
        yield from ((each, "") for each in type(module).__mro__)
        yield from ((each, "") for each in functions_of(module))

    def _of_function(self, value: Any) -> Iterator[tuple[object, str]]:  # noqa: ANN401  (any object of a user)
        if isinstance(value, partial):
            called = value.func
            if not isinstance(called, types.FunctionType) or not _is_foreign(called):
                given = (called, *value.args, *value.keywords.values())
                yield from ((each, "") for each in given)
        elif isinstance(value, types.MethodType):
            yield from ((each, "") for each in (value.__self__, value.__func__))
            if isinstance(value.__self__, nn.Module):  # other methods, if it is not followed
                yield from ((each, "") for each in functions_of(value.__self__))
            return
        if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
            yield (wrapped, "")  # decorators like torch.no_grad() wrap it
        if (
            not isinstance(value, types.FunctionType)
            or _is_foreign(value)
            or _INSTALLED in value.__code__.co_filename
        ):
            return
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((cell, name) for name, cell in cells)
        kept = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        yield from _followed((each, value.__name__) for each in (*kept, vars(value)))
        named = {*names_of(value.__code__)}
        yield from self._of_globals(value.__globals__, named, "")
        for each in named & sys.modules.keys():  # imported inside the function
            yield from self._of_import(sys.modules[each], named)

    def _of_globals(
        self, known: dict[str, object], named: set[str], prefix: str
    ) -> Iterator[tuple[object, str]]:
        """Keep the globals of a file that a function names; functions of one file share them."""
        number = id(known)
        if number not in self._named:
            self._named[number] = set()
            yield from self._table(known, prefix, *globals_table(known, self._named[number]))
        added = named - self._named[number]
        self._named[number] |= added
        found = {key: known[key] for key in added & known.keys()}
        self._tables[number].before |= found
        yield from _followed((each, f"{prefix}{key}") for key, each in found.items())
        for each in (known[key] for key in named & known.keys()):
            yield from self._of_import(each, named)

    def _of_import(self, found: object, named: set[str]) -> Iterator[tuple[object, str]]:
        """Keep the globals of an imported user file that a function names as attributes."""
        if isinstance(found, types.ModuleType) and _is_callers(found):
            key = (id(found), frozenset(named))
            if key not in self._imports:
                self._imports.add(key)
                yield from self._of_globals(vars(found), named, f"{found.__name__}.")


def _followed(found: Iterable[tuple[object, str]]) -> Sequence[tuple[object, str]]:
    return [
        (each, name)
        for each, name in found
        if not isinstance(each, PLAIN) or isinstance(each, type)
    ]


def _is_foreign(defined: type | types.FunctionType) -> bool:
    return (defined.__module__ or "").split(".")[0] in FOREIGN


def _is_installed(defined: type) -> bool:
    """Return True for a class of an installed package."""
    module = sys.modules.get(defined.__module__)
    return _INSTALLED in (getattr(module, "__file__", None) or "")


def _is_callers(found: types.ModuleType) -> bool:
    """Return True for a file that is neither installed nor of torch or the standard library."""
    path = getattr(found, "__file__", None) or ""
    return bool(path) and _INSTALLED not in path and found.__name__.split(".")[0] not in FOREIGN


def functions_of(module: nn.Module) -> list[object]:
    """Return the functions that a call of a module may run: methods, hooks and attributes."""
    table: dict[str, Any] = vars(module)
    found: list[object] = [each for each in table.values() if isinstance(each, _FUNCTIONS)]
    hooks = [*table["_forward_hooks"].values(), *table["_forward_pre_hooks"].values()]
    for cls in type(module).__mro__:
        if not _is_foreign(cls):
            members = [each for key, each in vars(cls).items() if key != "__init__"]
            found += [getattr(each, "fget", getattr(each, "__func__", each)) for each in members]
    return [*(each for each in found if isinstance(each, _FUNCTIONS)), *hooks]
