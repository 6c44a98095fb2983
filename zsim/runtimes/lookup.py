"""Installed runtimes by name, with their parts.

A runtime is registered as an entry point of the group "zsim.runtimes": its name, and a `Runtime`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TypeVar, cast

from zsim.entry_point import EntryPointError, referred
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
        EntryPointError: a registered object is not a `Runtime`.
    """
    found: dict[str, Runtime] = {}
    for name, runtime in registered().items():
        if not isinstance(runtime, Runtime):
            raise EntryPointError(f"{GROUP}: {name}: {runtime!r} must be a Runtime")
        found[name] = runtime
    return found


def part(value: _Part | str, *, name: str) -> _Part:
    """Return a part of a runtime; import it if it is text, which messages call `name`.

    Raises:
        EntryPointError: the text names nothing; one line.
    """
    if not isinstance(value, str):
        return value
    return cast("_Part", referred(value, field=f"{GROUP}: {name}"))


@cache
def search_of(name: str) -> SearchSpace:
    """Return the options of a runtime that a search varies.

    Raises:
        EntryPointError: the registered object is not a `SearchSpace`.
    """
    found = part(runtimes()[name].search, name=f"{name}.search")
    if not isinstance(found, SearchSpace):
        raise EntryPointError(f"{GROUP}: {name}.search: {found!r} must be a SearchSpace")
    return found


@cache
def file_keys() -> tuple[str, ...]:
    """Return the keys of `[zero]` that name files of trainers.

    Raises:
        EntryPointError: two runtimes read files of one key.
    """
    found: list[str] = []
    for name, runtime in runtimes().items():
        for key in runtime.config.readers:
            if key in found:
                raise EntryPointError(f"{GROUP}: {name}.config: {key!r} is read by another runtime")
            found.append(key)
    return tuple(sorted(found))


def kind_of_file(text: str) -> str | None:
    """Return the key of `[zero]` for files such as `text`, by their marks; None if none fits."""
    for runtime in runtimes().values():
        for key, groups in runtime.config.marks.items():
            if any(all(word in text for word in group) for group in groups):
                return key
    return None


def reader_of(key: str) -> Read:
    """Return the reader of the files that a key of `[zero]` names.

    Raises:
        EntryPointError: it does not exist.
        ModuleNotFoundError: it needs a package that is not installed.
    """
    readers = ((name, each.config.readers) for name, each in runtimes().items())
    name, reader = next((name, each[key]) for name, each in readers if key in each)
    return part(reader, name=f"{name}.config.readers.{key}")


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
        kind = of_suffix[asked.runtime]
        return part(kind.write, name=f"{asked.runtime}.config.kinds.write")(asked)
    if of_suffix:
        owner, kind = next(iter(of_suffix.items()))
        raise MistakeError(f"--config: {kind.program} trains with {owner}, not {asked.runtime}")
    write = runtimes()[asked.runtime].config.write
    if write is None:
        known = ", ".join(
            name for name, each in runtimes().items() if each.config.write is not None
        )
        raise MistakeError(f"--config: {asked.runtime} has no configuration here; {known} have")
    return part(write, name=f"{asked.runtime}.config.write")(asked)


@cache
def host_costs_of(name: str) -> HostCosts:
    """Return the times that a trainer takes of a host, by the name of its runtime.

    Raises:
        EntryPointError: there is no such file.
        ValueError: its file is not valid.
    """
    reference = runtimes()[name].host_costs
    if reference is None:
        return PLAIN
    package, _, file = reference.partition(":")
    try:
        text = (files(package) / file).read_text("utf-8")
    except (OSError, ModuleNotFoundError):
        why = "there is no such file; write package:file"
        raise EntryPointError(f"{GROUP}: {name}.host_costs: {reference!r}: {why}") from None
    return HostCosts.read(tomllib.loads(text))
