"""Systems, nodes, fabrics and GPUs that ship with zsim, every number with its source beside it.

The folders `profiles` and `kernels` hold fitted constants of networks and of kernels, by kind of
GPU; `zsim calibrate` wrote them.
"""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from zsim.cluster.cluster import Cluster
from zsim.cluster.files import Part, TopologyError, UnknownTopologyError, cluster_of

FOLDERS = {Part.SYSTEM: "systems", Part.NODE: "nodes", Part.FABRIC: "fabrics", Part.GPU: "gpus"}


@cache
def names(part: Part = Part.SYSTEM) -> tuple[str, ...]:
    """Names of all systems, or of all nodes, fabrics or GPUs, sorted."""
    found = (path.name for path in files(__name__).joinpath(FOLDERS[part]).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def text(name: str, part: Part = Part.SYSTEM) -> str:
    """Return the TOML of a system, node, fabric or GPU, as it stands.

    Raises:
        UnknownTopologyError: there is none of that name; the message lists those that exist.
    """
    if name not in names(part):
        raise UnknownTopologyError(f"{name!r} must be one of {', '.join(names(part))}", part)
    return files(__name__).joinpath(FOLDERS[part], f"{name}.toml").read_text("utf-8")


def table(part: Part, name: str) -> dict[str, Any]:
    """Return the same, read.

    Raises:
        UnknownTopologyError: there is none of that name; the message lists those that exist.
        TopologyError: its file cannot be read.
    """
    try:
        return tomllib.loads(text(name, part))
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{name}: not TOML: {error}") from None


def load(name: str, nodes: int = 1) -> Cluster:
    """Return the cluster of `nodes` nodes of the system.

    Raises:
        UnknownTopologyError: there is none of that name; the message lists those that exist.
        TopologyError: its file cannot be read.
        ClusterError: `nodes` is less than 1.
    """
    return cluster_of(name, table(Part.SYSTEM, name), nodes, table)


@cache
def profiles() -> dict[str, str]:
    """TOML of the fitted constants of networks of every kind of GPU, by its name."""
    return _fitted("profiles")


@cache
def kernel_profiles() -> dict[str, str]:
    """TOML of the fitted constants of kernels of every kind of GPU, by its name."""
    return _fitted("kernels")


def _fitted(folder_name: str) -> dict[str, str]:
    folder = files(__name__).joinpath(folder_name)
    found = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
    return {
        name.removesuffix(".toml"): text
        for name, text in sorted(found.items())
        if name.endswith(".toml")
    }
