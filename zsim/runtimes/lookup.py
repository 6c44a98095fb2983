"""Installed runtimes by name, with their parts.

A runtime is registered as an entry point of the group "zsim.runtimes": its name, and a `Runtime`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint
from importlib.resources import files
from typing import TypeVar, cast

from zsim.mistake import MistakeError
from zsim.runtimes.config import ConfigQuestion, Read
from zsim.runtimes.host_costs import PLAIN, HostCosts
from zsim.runtimes.runtime import Runtime
from zsim.runtimes.search import SearchSpace
from zsim.strategy.runtime_options import GROUP, registered

_Part = TypeVar("_Part")


@cache
def runtimes() -> Mapping[str, Runtime]:
    """Return every installed runtime by name.

    Raises:
        TypeError: a registered object is not a `Runtime`.
    """
    found: dict[str, Runtime] = {}
    for name, runtime in registered().items():
        if not isinstance(runtime, Runtime):
            raise TypeError(f"runtime {name!r}: {runtime!r} must be a Runtime")
        found[name] = runtime
    return found


def _imported(reference: str) -> object:
    """Return the object of the text `module:name`."""
    return EntryPoint(name=reference, value=reference, group=GROUP).load()


def part(value: _Part | str) -> _Part:
    """Return a part of a runtime; import it if it is text."""
    return cast("_Part", _imported(value)) if isinstance(value, str) else value


@cache
def search_of(name: str) -> SearchSpace:
    """Return the options of a runtime that a search varies.

    Raises:
        TypeError: the registered object is not a `SearchSpace`.
    """
    found = part(runtimes()[name].search)
    if not isinstance(found, SearchSpace):
        raise TypeError(f"runtime {name!r}: search: {found!r} must be a SearchSpace")
    return found


@cache
def file_keys() -> tuple[str, ...]:
    """Return the keys of `[zero]` that name files of trainers.

    Raises:
        ValueError: two runtimes read the same key.
    """
    found: list[str] = []
    for name, runtime in runtimes().items():
        for key in runtime.config.readers:
            if key in found:
                raise ValueError(f"runtime {name!r}: {key!r} is read by another runtime")
            found.append(key)
    return tuple(sorted(found))


def reader_of(key: str) -> Read:
    """Return the reader of the files that a key of `[zero]` names.

    Raises:
        ModuleNotFoundError: it needs a package that is not installed.
    """
    readers = (each.config.readers for each in runtimes().values())
    return part(next(each[key] for each in readers if key in each))


def config_text(asked: ConfigQuestion, *, suffix: str = "") -> str:
    """Return the configuration of the runtime of a setting, as a file with a suffix.

    Raises:
        MistakeError: there is no such configuration, or it cannot express the setting.
    """
    of_suffix = {
        name: kind
        for name, runtime in runtimes().items()
        for kind in runtime.config.kinds
        if kind.suffix == suffix
    }
    if asked.runtime in of_suffix:
        return part(of_suffix[asked.runtime].write)(asked)
    if of_suffix:
        owner, kind = next(iter(of_suffix.items()))
        raise MistakeError(f"--config: {kind.program} trains with {owner}, not {asked.runtime}")
    write = runtimes()[asked.runtime].config.write
    if write is None:
        known = ", ".join(
            name for name, each in runtimes().items() if each.config.write is not None
        )
        raise MistakeError(f"--config: {asked.runtime} has no configuration here; {known} have")
    return part(write)(asked)


@cache
def host_costs_of(name: str) -> HostCosts:
    """Return the times that a trainer takes of a host, by the name of its runtime.

    Raises:
        ValueError: its file is not valid.
    """
    reference = runtimes()[name].host_costs
    if reference is None:
        return PLAIN
    package, _, file = reference.partition(":")
    return HostCosts.read(tomllib.loads((files(package) / file).read_text("utf-8")))
