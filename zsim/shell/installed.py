"""Scenarios and topologies that ship with installed packages, found through entry points.

A package of scenarios has `names()` and `text(name)`; one of topologies has these and
`load(name, nodes)`, which returns a `Cluster`.
"""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from zsim.cluster import Cluster
from zsim.topology import TopologyError, UnknownTopologyError, cluster_of


class Scenarios(Protocol):
    """A package that ships scenario files."""

    def names(self) -> tuple[str, ...]:
        """Their names, sorted."""
        ...

    def text(self, name: str) -> str:
        """The TOML of one of them."""
        ...


class Topologies(Protocol):
    """A package that ships descriptions of clusters."""

    def names(self) -> tuple[str, ...]:
        """Their names, sorted."""
        ...

    def text(self, name: str) -> str:
        """The TOML of one of them."""
        ...

    def load(self, name: str, nodes: int) -> Cluster:
        """The cluster of that name with so many nodes."""
        ...


def scenarios() -> dict[str, str]:
    """TOML of every scenario that ships, by name."""
    packages = cast("Iterator[Scenarios]", _packages("zsim.scenarios"))
    return {name: package.text(name) for package in packages for name in package.names()}


@cache
def _topologies() -> dict[str, Topologies]:
    packages = cast("Iterator[Topologies]", _packages("zsim.topologies"))
    return {name: package for package in packages for name in package.names()}


def topology_names() -> tuple[str, ...]:
    """Names of every topology that ships, sorted."""
    return tuple(sorted(_topologies()))


def topology_text(name: str) -> str:
    """The TOML of the topology `name`, which ships."""
    return _topologies()[name].text(name)


def topology(name: str, nodes: int) -> Cluster:
    """The cluster called `name`, or in the file `name` if it ends in .toml, with so many nodes.

    Raises:
        TopologyError: there is none, or it cannot be read; the message names those that ship.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name), nodes)
    if name not in _topologies():
        raise UnknownTopologyError(f"{name!r} must be one of {', '.join(topology_names())}")
    return _topologies()[name].load(name, nodes)


def _from_file(path: Path, nodes: int) -> Cluster:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise TopologyError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: not TOML: {error}") from None
    return cluster_of(str(path), table, nodes)


def _packages(group: str) -> Iterator[object]:
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        yield entry.load()
