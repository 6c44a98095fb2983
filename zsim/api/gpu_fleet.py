"""GPUs by the words that people use for them: `128xh100`, `dgx2`, `4x4090`."""

import re
from dataclasses import dataclass
from typing import Final

from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.files import Part, TopologyError
from zsim.dtype import DType
from zsim.files.installed import find, fitted_for, part_names, topology
from zsim.limits import limits
from zsim.mistake import MistakeError, mistakes
from zsim.scenario.toml import setting_value
from zsim.suggestion import one_of
from zsim.units import parse_power

NODE_OF: Final = {
    "v100": "dgx2",
    "a100": "dgx_a100",
    "h100": "dgx_h100",
    "h200": "dgx_h200",
    "b200": "hgx_b200",
    "gb200": "gb200_nvl72",
    "4090": "workstation_4x4090",
}
"""The node that a GPU is in where nobody names one."""

FABRIC: Final = "rail_optimized"
"""The fabric between nodes where nobody names one."""

SWITCH: Final = "single_switch"
"""The fabric of nodes that do not go with rails: fewer NICs than GPUs."""

ASKED = re.compile(r"(?:([0-9]+)\s*x\s*)?([A-Za-z0-9_.\-]+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFleet:
    """GPUs that somebody has.

    Attributes:
        gpus: how many.
        node: name of the node that they are in.
        fabric: name of the fabric between nodes.
        cluster: one node of them.
        tables: what a scenario says of them, without their number.
    """

    gpus: int
    node: str
    fabric: str
    cluster: Cluster
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


def gpu_fleet(text: str) -> GpuFleet:
    """Return the GPUs that `text` names: so many of a GPU, or so many nodes.

    Raises:
        MistakeError: nothing of that name ships, or they do not fill nodes.
    """
    match = ASKED.fullmatch(text.strip().lower())
    if match is None:
        raise MistakeError(f"--gpus: {text!r} must be a number and a name, such as 128xh100")
    most, digits = limits().ranks, (match[1] or "1").lstrip("0")
    count, name = int(digits[: len(str(most)) + 1] or 0), match[2]
    nodes = part_names(Part.NODE)
    if not count:
        raise MistakeError(f"--gpus: {text!r} must be at least 1 GPU")
    if name not in NODE_OF and name not in nodes:
        raise MistakeError(f"--gpus: {one_of(name, (*NODE_OF, *nodes))}")
    node = NODE_OF.get(name, name)
    with mistakes(TopologyError, ClusterError, prefix="--gpus: "):
        cluster = topology(node, SWITCH, 1)
    per_node = cluster.gpus_per_node
    gpus = count if name in NODE_OF else count * per_node
    if gpus > most:
        raise MistakeError(f"--gpus: {text!r} must be at most {most:,} GPUs")
    if gpus > per_node and gpus % per_node:
        raise MistakeError(
            f"--gpus: {gpus} must be at most {per_node}, or a multiple of it: "
            f"{node} has {per_node} GPUs a node"
        )
    fabric = FABRIC if cluster.nics_per_node % per_node == 0 else SWITCH
    tables: dict[str, dict[str, object]] = {"cluster": {"node": node, "fabric": fabric}}
    for setting in fitted_for(cluster):
        key, _, value = setting.partition("=")
        table, _, field = key.partition(".")
        tables[table] = {field: setting_value(setting, value)}
    return GpuFleet(gpus=gpus, node=node, fabric=fabric, cluster=cluster, tables=tables)


def gpu_power_w(gpu: str) -> int | None:
    """Return the watts that a GPU draws at most by its data sheet; None where none is known."""
    for name in part_names(Part.GPU):
        table = find(Part.GPU, name)
        if table.get("name") == gpu and "power" in table:
            return parse_power(str(table["power"]))
    return None
