"""GPUs by the words that people use for them: `128xh100`, `dgx2`, `4x4090`."""

import re
from dataclasses import dataclass
from typing import Final

from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.files import Part, TopologyError
from zsim.cluster.files.lone_gpu import holds_lone_gpu
from zsim.dtype import DType
from zsim.files.installed import find, fitted_for, part_names, topology, usual_nodes
from zsim.limits import limits
from zsim.mistake import MistakeError, mistakes
from zsim.scenario.toml import setting_value
from zsim.suggestion import one_of
from zsim.units import parse_power

FABRIC: Final = "rail_optimized"
"""The fabric between nodes where nobody names one."""

SWITCH: Final = "single_switch"
"""The fabric of nodes that do not go with rails: fewer NICs than GPUs."""

ASKED = re.compile(r"(?:([0-9]+)\s*[xX]\s*)?(\S+|\S.*\.(?:toml|xml))", re.ASCII | re.IGNORECASE)

FILES: Final = (".toml", ".xml")
"""Ends of the names of files that describe a GPU or a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFleet:
    """GPUs that somebody has.

    Attributes:
        gpus: how many.
        node: name of the node that they are in.
        fabric: name of the fabric between nodes.
        cluster: one node of them.
        power_w: what a GPU draws at most; None if that is not known.
        tables: what a scenario says of them, without their number.
    """

    gpus: int
    node: str
    fabric: str
    cluster: Cluster
    power_w: int | None
    tables: dict[str, dict[str, object]]

    @property
    def title(self) -> str:
        """The GPUs in words: 128 H100."""
        return f"{self.gpus:,} {self.cluster.gpu.name.partition('-SXM')[0]}"

    @property
    def precision(self) -> str:
        """The 16-bit format that the GPU multiplies in: bf16 if it has that."""
        known = {rate.dtype for rate in self.cluster.gpu.rates}
        return "bf16" if DType.BF16 in known else "fp16"


def gpu_fleet(text: str, gpu: str | None = None) -> GpuFleet:
    """Return the GPUs that `text` names: so many of a GPU, or so many nodes.

    A name is one that ships or a file; `gpu` names another GPU than that of the node.

    Raises:
        MistakeError: nothing of that name ships, a file is wrong, or the GPUs do not fill nodes.
    """
    match = ASKED.fullmatch(text.strip())
    if match is None:
        raise MistakeError(f"--gpus: {text!r} must be a number and a name, such as 128xh100")
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
    for setting in fitted_for(cluster):
        key, _, value = setting.partition("=")
        table, _, field = key.partition(".")
        tables[table] = {field: setting_value(setting, value)}
    return GpuFleet(
        gpus=gpus, node=node, fabric=fabric, cluster=cluster, power_w=power_w, tables=tables
    )


def _node_of(name: str, count: int) -> tuple[str, bool]:
    """Return the node that `name` stands for, and whether it is so many GPUs, not nodes.

    Raises:
        MistakeError: it is neither known nor a file.
    """
    if name.lower().endswith(FILES):
        with mistakes(TopologyError, prefix="--gpus: "):
            table = find(Part.NODE, name)
        return name, holds_lone_gpu(table)
    word, usual = name.lower(), usual_nodes()
    if word in usual:
        return usual_node(word, count), True
    nodes = part_names(Part.NODE)
    if word not in nodes:
        gpus = part_names(Part.GPU)
        words = tuple(each for each in usual if each not in gpus)
        or_else = "a file, a node or GPU that ships (zsim list nodes, zsim list gpus), or "
        why = one_of(word, words, or_else=or_else, unlisted=(*gpus, *nodes))
        raise MistakeError(f"--gpus: {why}")
    return word, False


def usual_node(word: str, count: int) -> str:
    """Return the smallest node that holds `count` of the GPUs called `word`, or the largest."""
    nodes = usual_nodes()[word]
    holding = (node for node in nodes if find(Part.NODE, node)["node"]["gpus"] >= count)
    return next(holding, nodes[-1])


def _power_w(node: str, gpu: str | None) -> int | None:
    """Return the watts of the GPU of `node`, or of `gpu`, where a file says them."""
    table = find(Part.NODE, node).get("gpu") if gpu is None else gpu
    if isinstance(table, str):
        table = find(Part.GPU, table)
    power = table.get("power") if isinstance(table, dict) else None
    return None if power is None else parse_power(str(power))


def gpu_power_w(gpu: str) -> int | None:
    """Return the watts that a GPU draws at most by its data sheet; None if none is known."""
    for name in part_names(Part.GPU):
        table = find(Part.GPU, name)
        if table.get("name") == gpu and "power" in table:
            return parse_power(str(table["power"]))
    return None
