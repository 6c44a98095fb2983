"""GPUs by their common names: `128xh100`, `dgx2`, `4x4090`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.files import Part, TopologyError
from zsim.cluster.files.lone_gpu import holds_lone_gpu
from zsim.dtype import DType
from zsim.files.installed import (
    find,
    fitted_for,
    part_names,
    topology,
    usual_nodes,
)
from zsim.files.nearest_gpu import borrowed_for
from zsim.limits import limits
from zsim.mistake import MistakeError, mistakes
from zsim.scenario.toml import setting_value
from zsim.suggestion import one_of
from zsim.units import parse_power

FABRIC: Final = "rail_optimized"
"""Default fabric between nodes."""

SWITCH: Final = "single_switch"
"""Fabric of nodes with fewer NICs than GPUs, which cannot be rail-optimized."""

ASKED = re.compile(r"(?:([0-9]+)\s*[xX]\s*)?(\S+|\S.*\.(?:toml|xml))", re.ASCII | re.IGNORECASE)

COUNTED = re.compile(r"([0-9]+)([a-z]\S*)", re.ASCII | re.IGNORECASE)
"""A number and a GPU without the x between them."""

REVERSED: Final = re.compile(r"([a-z][a-z0-9_-]*)\s*[x*]\s*([0-9]+)", re.ASCII | re.IGNORECASE)
"""A name before its number, as in h100x8."""

MAKERS: Final = re.compile(r"(?:(?:nvidia|geforce|tesla|amd|instinct)_?)+")
"""Words before the name of a GPU that do not tell GPUs apart."""

FILES: Final = (".toml", ".xml")
"""Suffixes of files that describe a GPU or a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFleet:
    """A number of equal GPUs in nodes.

    Attributes:
        gpus: number of GPUs.
        node: name of the node.
        fabric: name of the fabric between nodes.
        cluster: cluster of one such node.
        power_w: power limit of a GPU in watts; None if unknown.
        tables: scenario tables of the cluster, without the number of nodes, and of the constants of
            its GPU, or of the nearest measured GPU.
    """

    gpus: int
    node: str
    fabric: str
    cluster: Cluster
    power_w: int | None
    tables: dict[str, dict[str, object]]

    @property
    def title(self) -> str:
        """Number and name of the GPUs, such as "128 H100"."""
        return f"{self.gpus:,} {self.cluster.gpu.name.partition('-SXM')[0]}"

    @property
    def precision(self) -> str:
        """The 16-bit format of the GPU's matrix products: bf16 if it supports that."""
        known = {rate.dtype for rate in self.cluster.gpu.rates}
        return "bf16" if DType.BF16 in known else "fp16"


def gpu_fleet(text: str, gpu: str | None = None) -> GpuFleet:
    """Return the GPUs that `text` names: a number of GPUs, or a number of nodes.

    A name is that of a preset or of a file; `gpu` replaces the GPU of the node.

    Raises:
        MistakeError: the name is unknown, a file is wrong, or the GPUs do not fill whole nodes.
    """
    match = ASKED.fullmatch(text.strip())
    if match is None:
        raise MistakeError(f"--gpus: {text!r} must be a number and a name, such as 128xh100")
    if match[1] is None and (meant := _meant(match[2])) is not None:
        raise MistakeError(f"--gpus: {text!r}: did you mean {meant}?")
    most, digits = limits().ranks, (match[1] or "1").lstrip("0")
    count = int(digits[: len(str(most)) + 1] or 0)
    if not count:
        raise MistakeError(f"--gpus: {text!r} must be at least 1 GPU")
    node, counts_gpus = _node_of(match[2], count)
    with mistakes(TopologyError, ClusterError, prefix="--gpus: "):
        cluster = topology(node, SWITCH, 1, gpu)
        power_w = _power_w(node, gpu)
    per_node = cluster.gpus_per_node
    gpus = count if counts_gpus else count * per_node
    if gpus > most:
        raise MistakeError(f"--gpus: {text!r} must be at most {most:,} GPUs")
    if gpus > per_node and gpus % per_node:
        raise MistakeError(
            f"--gpus: {gpus} must be at most {per_node}, or a multiple of it: "
            f"{node} has {per_node} GPUs a node"
        )
    fabric = FABRIC if cluster.nics_per_node % per_node == 0 else SWITCH
    tables: dict[str, dict[str, object]] = {"cluster": {"node": node, "fabric": fabric}}
    if gpu is not None:
        tables["cluster"]["gpu"] = gpu
    with mistakes(ClusterError, prefix="--gpus: "):
        settings = (*fitted_for(cluster), *borrowed_for(cluster))
    for setting in settings:
        key, _, value = setting.partition("=")
        table, _, field = key.partition(".")
        tables[table] = {field: setting_value(setting, value)}
    return GpuFleet(
        gpus=gpus, node=node, fabric=fabric, cluster=cluster, power_w=power_w, tables=tables
    )


def _meant(text: str) -> str | None:
    """Return the probable meaning of an unreadable `text`, such as 8xh100; None if unknown."""
    if text.isdecimal():
        return f"{text}xh100, or {text} of other GPUs (zsim list gpus)"
    found = COUNTED.fullmatch(text)
    number, name = (found[1], found[2]) if found else ("", "")
    if found is None and (found := REVERSED.fullmatch(text)):
        number, name = found[2], found[1]
    word = _usual_word(name.lower())
    return f"{number}x{word}" if word in usual_nodes() else None


def _usual_word(text: str) -> str:
    """Return the common name of the GPU called `text`, such as h100 for nvidia-h100-sxm5-80gb.

    A text that is no longer name of one GPU is returned as it is.
    """
    usual = usual_nodes()
    spelled = MAKERS.sub("", text.replace("-", "_"), count=1)
    for word in (text, spelled, spelled.removeprefix("rtx_"), spelled.removeprefix("rtx")):
        if word in usual:
            return word
    parts = spelled.removeprefix("rtx").strip("_").split("_")
    if parts[0] in usual and _has_parts(find(Part.NODE, usual[parts[0]][0])["gpu"], parts):
        return parts[0]
    named = [name for name in part_names(Part.GPU) if name in usual and _has_parts(name, parts)]
    return named[0] if len(named) == 1 else text


def gpu_of_word(text: str) -> str | None:
    """Return the name of the file of a GPU that people call `text`, such as h100, or None."""
    nodes = usual_nodes().get(_usual_word(text.lower()))
    gpu = None if nodes is None else find(Part.NODE, nodes[0])["gpu"]
    return gpu if isinstance(gpu, str) else None


def _has_parts(name: object, parts: Sequence[str]) -> bool:
    """Return True if the name of a GPU has each of `parts`; sxm is in sxm4, but l40 not in l40s."""
    words = name.split("_") if isinstance(name, str) else []
    words += ["sxm"] if any(word.startswith("sxm") for word in words) else []
    return set(parts) <= set(words)


def _node_of(name: str, count: int) -> tuple[str, bool]:
    """Return the node named `name`, and True if `count` counts GPUs, False if it counts nodes.

    Raises:
        MistakeError: `name` is neither a known name nor a file.
    """
    if name.lower().endswith(FILES):
        with mistakes(TopologyError, prefix="--gpus: "):
            table = find(Part.NODE, name)
        return name, holds_lone_gpu(table)
    word, usual = _usual_word(name.lower()), usual_nodes()
    if word in usual:
        return usual_node(word, count), True
    nodes = part_names(Part.NODE)
    if word not in nodes:
        gpus = part_names(Part.GPU)
        words = tuple(each for each in usual if each not in gpus)
        or_else = "a file, a name that zsim list nodes or zsim list gpus prints, or "
        why = one_of(word, words, or_else=or_else, unlisted=(*gpus, *nodes))
        raise MistakeError(f"--gpus: {why}")
    return word, False


def usual_node(word: str, count: int) -> str:
    """Return the smallest node that holds `count` of the GPUs called `word`, or the largest."""
    nodes = usual_nodes()[word]
    holding = (node for node in nodes if find(Part.NODE, node)["node"]["gpus"] >= count)
    return next(holding, nodes[-1])


def _power_w(node: str, gpu: str | None) -> int | None:
    """Return the power limit in watts of `gpu`, or of the GPU of `node`; None if unknown."""
    table = find(Part.NODE, node).get("gpu") if gpu is None else gpu
    if isinstance(table, str):
        table = find(Part.GPU, table)
    power = table.get("power") if isinstance(table, dict) else None
    return None if power is None else parse_power(str(power))


def gpu_power_w(gpu: str) -> int | None:
    """Return the power limit in watts from the data sheet of a GPU; None if unknown."""
    for name in part_names(Part.GPU):
        table = find(Part.GPU, name)
        if table.get("name") == gpu and "power" in table:
            return parse_power(str(table["power"]))
    return None
