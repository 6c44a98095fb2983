"""Systems, nodes, fabrics and GPUs that ship with zsim, each number with its source.

The folders `profiles` and `kernels` hold the constants of networks and kernels for each kind of
GPU, fitted by `zsim calibrate`.
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
    """Return the names of all systems (or nodes, fabrics or GPUs), sorted."""
    found = (path.name for path in files(__name__).joinpath(FOLDERS[part]).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def text(name: str, part: Part = Part.SYSTEM) -> str:
    """Return the TOML text of a system, node, fabric or GPU, as it is in its file.

    Raises:
        UnknownTopologyError: no file has that name; the message lists the known names.
    """
    if name not in names(part):
        raise UnknownTopologyError(f"{name!r} must be one of {', '.join(names(part))}", part)
    return files(__name__).joinpath(FOLDERS[part], f"{name}.toml").read_text("utf-8")


def table(part: Part, name: str) -> dict[str, Any]:
    """Return the parsed TOML of a system, node, fabric or GPU.

    Raises:
        UnknownTopologyError: no file has that name; the message lists the known names.
        TopologyError: the file is not TOML.
    """
    try:
        return tomllib.loads(text(name, part))
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{name}: not TOML: {error}") from None


def load(name: str, nodes: int = 1) -> Cluster:
    """Return a cluster of `nodes` nodes of the system `name`.

    Raises:
        UnknownTopologyError: no system has that name; the message lists the known names.
        TopologyError: its file is invalid.
        ClusterError: `nodes` is less than 1.
    """
    return cluster_of(name, table(Part.SYSTEM, name), nodes, table)


@cache
def profiles() -> dict[str, str]:
    """Return the TOML texts of the fitted network constants, by name of the GPU."""
    return _fitted("profiles")


@cache
def kernel_profiles() -> dict[str, str]:
    """Return the TOML texts of the fitted kernel constants, by name of the GPU."""
    return _fitted("kernels")


def _fitted(folder_name: str) -> dict[str, str]:
    folder = files(__name__).joinpath(folder_name)
    found = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
    return {
        name.removesuffix(".toml"): text
        for name, text in sorted(found.items())
        if name.endswith(".toml")
    }
