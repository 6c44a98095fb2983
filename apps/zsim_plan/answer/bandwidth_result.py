"""Bandwidth that offloaded states need for a share of a GPU's peak, and that a cluster has.

Formulas: ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857), section 4. Nothing overlaps in
them, so a run with prefetching needs less.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from zsim.api.answer import Answer
from zsim.api.answer_text import table_text
from zsim.api.scenario import Changed
from zsim.api.topology_result import TopologyResult, read_topology
from zsim.closed_form import offload_formulas as offload
from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.host_links import HostFlow
from zsim.compute.host_rate import equal_bytes_per_s
from zsim.dtype import DType
from zsim.mistake import MistakeError
from zsim.report.svg.note import rate
from zsim.units import format_rate

SHARES: Final = (0.5, 0.8, 0.9)
"""Shares of the peak for which the needed bandwidth is shown."""

HALVES: Final = (DType.BF16, DType.FP16)

MAXIMUM: Final = 10**9
"""Largest number of tokens, and largest width."""

PARAMETERS, OPTIMIZER, CHECKPOINTS = "parameters, gradients", "optimizer states", "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBandwidth:
    """One kind of state on one path.

    Attributes:
        state: kind of state.
        path: where its bytes come from: other GPUs, host memory or drives.
        intensity: FLOPs of a GPU per byte that it reads or writes.
        shards: GPUs that share the bytes, each with its own path.
        bytes_per_s: bandwidth of the cluster for each GPU; None without the path.
    """

    state: str
    path: str
    intensity: float
    shards: int
    bytes_per_s: float | None

    def needed(self, share: float, peak_flops: float) -> float:
        """Return the bytes per second of each GPU's path for a `share` of its peak."""
        whole = offload.needed_bytes_per_s(
            intensity=self.intensity, share=share, peak_flops=peak_flops
        )
        return whole / self.shards

    def efficiency(self, peak_flops: float) -> float | None:
        """Return the share of the peak at the cluster's bandwidth; None without the path."""
        if self.bytes_per_s is None:
            return None
        whole = self.bytes_per_s * self.shards
        return offload.efficiency(
            intensity=self.intensity, bytes_per_s=whole, peak_flops=peak_flops
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthResult(Answer):
    """Bandwidth that each kind of state needs on a cluster.

    Attributes:
        title: name of the cluster.
        gpus: number of GPUs.
        peak_flops: FLOP/s that a GPU reaches when it does not wait.
        tokens: tokens of each GPU in a step.
        hidden: width of the model.
        states: every kind of state on every path.
    """

    title: str
    gpus: int
    peak_flops: float
    tokens: int
    hidden: int
    states: tuple[StateBandwidth, ...] = field(repr=False)

    def text(self) -> str:
        """Return a table of the bandwidth that each state needs, and that the cluster has."""
        columns = ("state", "from", *(f"for {share:.0%}" for share in SHARES), "here", "reaches")
        rows = [
            (
                each.state,
                each.path,
                *(_rate(each.needed(share, self.peak_flops)) for share in SHARES),
                "none" if each.bytes_per_s is None else _rate(each.bytes_per_s),
                "" if (reached := each.efficiency(self.peak_flops)) is None else f"{reached:.0%}",
            )
            for each in self.states
        ]
        return "\n".join(
            [
                f"{self.title}: bandwidth of each of {self.gpus:,} GPUs for a share of "
                f"{format_rate(int(self.peak_flops))}",
                f"{self.tokens:,} tokens for each GPU in a step, width {self.hidden:,}; "
                "nothing overlaps",
                "",
                table_text(columns, rows, words=(0, 1), ruled=True),
            ]
        )

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim bandwidth --json` prints."""
        return {
            "title": self.title,
            "gpus": self.gpus,
            "peak_flops": self.peak_flops,
            "tokens": self.tokens,
            "hidden": self.hidden,
            "states": [
                {
                    "state": each.state,
                    "from": each.path,
                    "flop_per_byte": each.intensity,
                    "needed_bytes_per_s": {
                        f"{share:g}": each.needed(share, self.peak_flops) for share in SHARES
                    },
                    "bytes_per_s": each.bytes_per_s,
                    "share_of_peak": each.efficiency(self.peak_flops),
                }
                for each in self.states
            ],
        }


def bandwidth(
    name: str,
    *,
    nodes: int = 1,
    tokens: int = 2048,
    hidden: int = 8192,
    peak_flops: float | None = None,
    changes: Changed = None,
) -> BandwidthResult:
    """Return the bandwidth that offloaded states need, and that of the cluster.

    Parameters and optimizer states are sharded over all GPUs, so each GPU's link to the host and
    its drives carry a part. Gathered parameters and checkpoints are whole.

    Args:
        name: cluster as in `read_topology`.
        nodes: number of nodes.
        tokens: tokens of each GPU in a step.
        hidden: width of the model.
        peak_flops: FLOP/s that a GPU reaches; default the 16-bit peak of its data sheet.
        changes: values by key as in `read_topology`.

    Raises:
        MistakeError: the cluster does not exist, or a number is out of range.
    """
    for option, value in (("tokens", tokens), ("hidden", hidden)):
        if not 1 <= value <= MAXIMUM:
            raise MistakeError(f"--{option}: {value} must be from 1 to {MAXIMUM:,}")
    if peak_flops is not None and not 0 < peak_flops <= 1e18:
        raise MistakeError(f"--peak: {peak_flops:g} must be more than 0, at most 1e18 FLOP/s")
    found = read_topology(name, nodes=nodes, changes=changes)
    cluster = found.cluster
    return BandwidthResult(
        title=found.title,
        gpus=cluster.ranks,
        peak_flops=peak_flops or _peak(cluster),
        tokens=tokens,
        hidden=hidden,
        states=tuple(_states(found, tokens=tokens, hidden=hidden)),
    )


def _states(found: TopologyResult, *, tokens: int, hidden: int) -> Iterator[StateBandwidth]:
    """Yield each kind of state on each path, in the order of the paper."""
    cluster = found.cluster
    # A ring enters each group of GPUs once, so the narrowest cut passes every gathered byte.
    gathered = min((float(cut.bytes_per_s) for cut in found.cuts), default=None)
    host = _each(cluster, HostFlow.COPY_IN)
    drives = _each(cluster, HostFlow.READ, HostFlow.COPY_IN)
    of_parameters = offload.parameter_intensity(sequences=1, sequence=tokens)
    of_optimizer = offload.optimizer_intensity(sequences=1, sequence=tokens)
    of_checkpoints = offload.checkpoint_intensity(hidden=hidden)
    for state, path, intensity, shards, has in (
        (PARAMETERS, "other GPUs", of_parameters, 1, gathered),
        (PARAMETERS, "host memory", of_parameters, cluster.ranks, host),
        (PARAMETERS, "drives", of_parameters, cluster.ranks, drives),
        (OPTIMIZER, "host memory", of_optimizer, cluster.ranks, host),
        (OPTIMIZER, "drives", of_optimizer, cluster.ranks, drives),
        (CHECKPOINTS, "host memory", of_checkpoints, 1, host),
        (CHECKPOINTS, "drives", of_checkpoints, 1, drives),
    ):
        yield StateBandwidth(
            state=state, path=path, intensity=intensity, shards=shards, bytes_per_s=has
        )


def _each(cluster: Cluster, *flows: HostFlow) -> float | None:
    """Return the bytes per second of each GPU if all copy at once; None without the hardware."""
    try:
        return float(equal_bytes_per_s(cluster, dict.fromkeys(flows, cluster.gpus_per_node)))
    except ClusterError:
        return None


def _peak(cluster: Cluster) -> float:
    """Return the dense 16-bit peak of the data sheet."""
    return float(max(each.peak for each in cluster.gpu.rates if each.dtype in HALVES))


def _rate(bytes_per_s: float) -> str:
    return rate(round(bytes_per_s))
