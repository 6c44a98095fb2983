"""Models and topologies that ship with installed packages, found through entry points.

A package of topologies has `names(part)` and `text(name, part)` for systems, nodes, fabrics and
GPUs; `profiles()` and `kernel_profiles()` return fitted constants.
"""

import tomllib
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from zsim.bounded_text import bounded_toml
from zsim.cluster.cluster import Cluster
from zsim.cluster.files import Part, TopologyError, UnknownTopologyError, cluster_of
from zsim.cluster.files.edges_csv import fabric_from_edges
from zsim.cluster.files.fabric import table_of_line
from zsim.cluster.files.lone_gpu import is_gpu, node_of_gpu
from zsim.cluster.foreign_profile import foreign_profiles, is_for
from zsim.cluster.profile.files import Profiles, parse
from zsim.cluster.profile.kernels import FittedKernels
from zsim.cluster.profile.kernels import parse as parse_kernels
from zsim.cluster.profile.network import NetworkProfile, ProfileError
from zsim.files.input_file import read_config, read_file
from zsim.files.shipped_files import model_families, packages
from zsim.mistake import reason_of
from zsim.network.algorithm.installed_algorithms import check
from zsim.network.band import band
from zsim.suggestion import one_of

if TYPE_CHECKING:
    from zsim.scenario.model_catalogue import ModelCatalogue


class Topologies(Protocol):
    """A package that ships descriptions of clusters and of their parts."""

    def names(self, part: Part) -> tuple[str, ...]:
        """Return the names of its systems, nodes, fabrics or GPUs, sorted."""
        ...

    def text(self, name: str, part: Part) -> str:
        """Return the TOML of a system, node, fabric or GPU."""
        ...

    def profiles(self) -> dict[str, str]:
        """Return TOML of fitted constants of networks, by kind of GPU."""
        ...

    def kernel_profiles(self) -> dict[str, str]:
        """Return TOML of fitted constants of kernels, by kind of GPU."""
        ...


@cache
def model_catalogue() -> "ModelCatalogue":
    """Return all installed models, by name."""
    from zsim.scenario.model_catalogue import ModelCatalogue

    return ModelCatalogue.of(model_families())


@cache
def _topologies(part: Part) -> dict[str, Topologies]:
    shipped = cast("Iterator[Topologies]", packages("zsim.topologies"))
    return {name: package for package in shipped for name in package.names(part)}


@cache
def network_profiles() -> dict[str, Profiles]:
    """Return fitted constants of networks, by kind of GPU."""
    shipped = cast("Iterator[Topologies]", packages("zsim.topologies"))
    texts = {name: text for each in shipped for name, text in each.profiles().items()}
    return {name: parse(name, tomllib.loads(text), check) for name, text in texts.items()}


def network_profile(name: str) -> NetworkProfile:
    """Return the fitted constants called `name`: of a kind of GPU, or GPU/SYSTEM.

    Raises:
        ProfileError: there are none; the message lists the installed names.
    """
    gpu, _, system = name.partition("/")
    known = network_profiles()
    names = [*known, *(f"{each}/{one}" for each in known for one in sorted(known[each].systems))]
    if name not in names:
        raise ProfileError(one_of(name, names))
    return known[gpu].of(system)


def network_band(
    network: NetworkProfile | None,
) -> tuple[NetworkProfile, NetworkProfile] | None:
    """Return the constants of the fastest and of the slowest fabric for `network`.

    None if it is not an installed profile, or of a profile without fabrics.
    """
    for profiles in network_profiles().values():
        for system in (None, *sorted(profiles.systems)):
            if profiles.fabrics and network == profiles.of(system):
                return band(profiles, system)
    return None


@cache
def fitted_kernels() -> dict[str, FittedKernels]:
    """Return fitted constants of kernels, by kind of GPU."""
    shipped = cast("Iterator[Topologies]", packages("zsim.topologies"))
    texts = {name: text for each in shipped for name, text in each.kernel_profiles().items()}
    return {name: parse_kernels(name, tomllib.loads(text)) for name, text in texts.items()}


def fitted_for(cluster: Cluster) -> tuple[str, ...]:
    """Return settings that give `cluster` the installed fitted constants of its GPU, if any.

    They replace data sheets, and constants of other GPUs.

    A profile fits a GPU if all parts of the profile's name, but a year, are parts of the GPU's
    name: h100_hbm2e_2025 fits H100-SXM5-96GB-HBM2e. Of several, the most specific counts, and of
    these the latest.
    """
    if cluster.gpu.measured is not None:
        return ()
    parts = set(cluster.gpu.name.lower().split("-"))
    foreign = foreign_profiles(cluster)
    of_links = {} if cluster.over_pcie else network_profiles()  # these are shares of NVLink
    found: list[str] = []
    for field, given, names in (
        ("compute", cluster.gpu.kernels, fitted_kernels()),
        ("network", cluster.network, of_links),
    ):
        fitting = [
            name for name in names if is_alike(name, parts) and is_for(name, cluster.gpu.name)
        ]
        if fitting and (given is None or f"{field}.profile" in foreign):
            found.append(f"{field}.profile={max(fitting, key=profile_age)}")
    return tuple(found)


def is_alike(profile: str, parts: Set[str]) -> bool:
    """Return True if all parts of the profile's name, but a year, are in `parts`."""
    return all(part in parts or part.isdigit() for part in profile.split("_"))


def profile_age(profile: str) -> tuple[int, str]:
    """Return the number of parts of a profile's name other than a year, and the year."""
    parts = profile.split("_")
    years = [part for part in parts if part.isdigit()]
    return len(parts) - len(years), max(years, default="")


def part_names(part: Part) -> tuple[str, ...]:
    """Return the names of every installed system, node, fabric or GPU, sorted."""
    return tuple(sorted(_topologies(part)))


def part_text(part: Part, name: str) -> str:
    """Return the TOML of an installed system, node, fabric or GPU."""
    return _topologies(part)[name].text(name, part)


def find(part: Part, name: str) -> dict[str, Any]:
    """Return the table of an installed part, or of the file `name`, which has a suffix.

    Raises:
        TopologyError: there is none, or it cannot be read; the message lists the installed names.
    """
    if name in _topologies(part):
        return _toml(name, part_text(part, name))
    match Path(name).suffix, part:
        case ".toml", Part.SYSTEM | Part.NODE:
            table = _toml(name, _file_text(name))
            return node_of_gpu(name, table) if is_gpu(table) else table
        case ".toml", _:
            return _toml(name, _file_text(name))
        case ".xml", Part.NODE:
            from zsim.cluster.files.nccl_xml import node_from_nccl

            return node_from_nccl(name, _file_text(name), _gpu_by_device)
        case ".csv", Part.FABRIC:
            return fabric_from_edges(name, _file_text(name))
        case _ if part is Part.FABRIC and (given := table_of_line(name)) is not None:
            return given
        case _ if part is Part.GPU and _is_unknown_device(name):
            why = (
                "no GPU that ships; name one with cluster.gpu, or a file (zsim show gpu --template)"
            )
            raise UnknownTopologyError(f"{name}: {why}", part)
        case _:
            raise UnknownTopologyError(one_of(name, part_names(part)), part)


def topology(
    name: str,
    fabric: str | None,
    nodes: int,
    gpu: str | None = None,
    *,
    nodes_per_domain: int | None = None,
) -> Cluster:
    """Return `nodes` nodes of the system `name`, or of the node `name` on `fabric`.

    `gpu` names another GPU in place of the node's. `nodes_per_domain` is the number of nodes that
    the job uses of each NVSwitch domain.

    Raises:
        TopologyError: there is none, or it cannot be read; the message lists the installed names.
        ClusterError: the parts do not fit each other.
    """
    if fabric is None:
        title, table = name, find(Part.SYSTEM, name)
    else:
        title, table = f"{name} on {fabric}", {"node": name, "fabric": fabric}
    return cluster_of(title, table, nodes, find, gpu=gpu, nodes_per_domain=nodes_per_domain)


@cache
def usual_nodes() -> dict[str, tuple[str, ...]]:
    """Return by word for a GPU the nodes that have it, ordered by number of GPUs.

    Words are given in the nodes' files; names of GPUs are added.
    """
    tables = {name: find(Part.NODE, name) for name in part_names(Part.NODE)}
    sizes = {name: (table["node"]["gpus"], name) for name, table in tables.items()}
    words: dict[str, list[str]] = {}
    for name, table in sorted(tables.items(), key=lambda each: sizes[each[0]]):
        for word in table.get("words", ()):
            words.setdefault(word, []).append(name)
    named = {table["gpu"] for table in tables.values() if isinstance(table["gpu"], str)}
    for gpu in sorted(named):
        usual = [each for each in words.values() if tables[each[0]]["gpu"] == gpu]
        holding = [name for name, table in tables.items() if table["gpu"] == gpu]
        words.setdefault(gpu, usual[0] if usual else sorted(holding, key=lambda each: sizes[each]))
    return {word: tuple(words[word]) for word in sorted(words)}


@cache
def first_gpu() -> str:
    """Return the word for a GPU that a form selects at first."""
    nodes = (find(Part.NODE, name) for name in part_names(Part.NODE))
    first = (each for each in nodes if each.get("comes_first"))
    words = [str(word) for each in first for word in each.get("words", ())]
    return next(iter((*words, *usual_nodes())))


def _is_unknown_device(name: str) -> bool:
    """Return True if `name` denotes a device without a known GPU in a topology of NCCL."""
    from zsim.cluster.files.nccl_xml import UNKNOWN_DEVICE

    return name.startswith(UNKNOWN_DEVICE)


def _file_text(name: str) -> str:
    try:
        return read_file(name) if name.endswith(".csv") else read_config(name)
    except OSError as error:
        raise TopologyError(f"{name}: {reason_of(error)}") from None
    except ValueError:
        raise TopologyError(f"{name}: not text") from None


def _toml(name: str, text: str) -> dict[str, Any]:
    try:
        return bounded_toml(text)
    except ValueError as error:
        raise TopologyError(f"{name}: not TOML: {error}") from None


def _gpu_by_device(device: str) -> str | None:
    """Return the installed GPU whose PCI device number is `device`, or None."""
    for name in part_names(Part.GPU):
        if device in find(Part.GPU, name).get("pci_devices", ()):
            return name
    return None
