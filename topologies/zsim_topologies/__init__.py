"""Systems that ship with zsim: what a node is made of, every number with its source beside it."""

import tomllib
from importlib.resources import files

from zsim.cluster import Cluster
from zsim.topology import TopologyError, UnknownTopologyError, cluster_of


def names() -> tuple[str, ...]:
    """Names of all systems, sorted."""
    found = (path.name for path in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def text(name: str) -> str:
    """The TOML of a system, as it stands.

    Raises:
        UnknownTopologyError: there is none of that name; the message lists those that exist.
    """
    if name not in names():
        raise UnknownTopologyError(f"{name!r} must be one of {', '.join(names())}")
    return files(__name__).joinpath(f"{name}.toml").read_text("utf-8")


def load(name: str, nodes: int = 1) -> Cluster:
    """The cluster of `nodes` nodes of the system.

    Raises:
        UnknownTopologyError: there is none of that name; the message lists those that exist.
        TopologyError: its file cannot be read.
        ClusterError: `nodes` is less than 1.
    """
    try:
        table = tomllib.loads(text(name))
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{name}: not TOML: {error}") from None
    return cluster_of(name, table, nodes)
