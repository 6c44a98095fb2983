"""Assumed node for a GPU that is known only from its own file."""

from typing import Any, Final

from zsim.cluster.files.gpu import RULE, GpuTable
from zsim.cluster.files.table import TopologyError, read

GPUS: Final = 8
NIC: Final = "50 GB/s"
SLOT: Final = "63 GB/s"
GPU_KEYS: Final = ("rates", "memory", "memory_bandwidth")
"""Keys of a GPU's file that a node's file does not have."""

SOURCE: Final = (
    f"{RULE}: eight GPUs on a switch with the GPU's link, each with a NIC of 400 Gb/s, as in a DGX "
    "H100; a file of a node says otherwise (zsim show node --template)"
)


def holds_lone_gpu(table: dict[str, Any]) -> bool:
    """Return True if `node_of_gpu` created the table of a node."""
    return table["node"].get("source") == SOURCE if isinstance(table.get("node"), dict) else False


def is_gpu(table: dict[str, Any]) -> bool:
    """Return True if the table describes a GPU: with memory or rates, but without a node."""
    return "node" not in table and any(key in table for key in GPU_KEYS)


def node_of_gpu(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of an assumed node with eight GPUs of the file `name`.

    Raises:
        TopologyError: the file is invalid, or lacks the bandwidth of the link.
    """
    gpu = read(GpuTable, name, table)
    if gpu.link is None:
        raise TopologyError(
            f"{name}: link: missing; give the bandwidth to the other GPUs of a node in each "
            'direction, such as "450 GB/s", or name a node beside cluster.gpu'
        )
    pcie = SLOT if gpu.pcie is None else table["pcie"]
    return {
        "title": f"{GPUS} {gpu.name} on a switch",
        "gpu": table,
        "node": {"gpus": GPUS, "nics": GPUS, "source": SOURCE},
        "nic": {"bandwidth_per_direction": NIC, "source": SOURCE},
        "pcie": {"bandwidth_per_direction": pcie, "source": SOURCE},
    }
