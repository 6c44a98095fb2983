"""Published times of links, for GPUs without published collectives.

Such a table has, for nodes of one kind, the time of a chunk from GPU to GPU and from node to node:
a latency and a time for its bytes. These determine the bandwidths and the extra latency between
nodes. Constants of protocols, kernels and hosts come from the nearest measured GPU without a
reducing switch: its fractions of link bandwidths, and its times in seconds.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zsim.cluster.profile.files import Profiles
from zsim.units import UnitError, parse_size
from zsim_lab.rows.csv_rows import (
    Cells,
    CsvRow,
    Finite,
    MeasuredError,
    NotModelledError,
    Whole,
    parsed,
)
from zsim_lab.rows.hardware import GPUS

LINK_TABLES = {"link_alpha_beta_v100": "v100"}
"""Tables of links, and the GPU of all their nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLinks:
    """One row: a chunk within a node, and between two nodes over one NIC."""

    gpus_per_node: int
    nics_per_node: int
    chunk_bytes: int
    near_s: float
    far_s: float
    crossing_s: float
    source: str


class _Link(CsvRow):
    """Times in microseconds: `alpha` before a chunk, `beta` for its bytes."""

    topology: str
    gpus_per_node: Whole
    nics_per_node: Whole
    intra_alpha: Finite
    intra_beta_list: str
    inter_alpha: Finite
    inter_beta: Finite


def read_links(file: str, rows: Iterable[Cells]) -> list[TimedLinks]:
    """Return the rows of the table `file`; if the lanes of a row differ, the fastest counts.

    Raises:
        MeasuredError: a column is missing, or a value is invalid.
    """
    found: list[TimedLinks] = []
    for number, cells in enumerate(rows, start=2):
        try:
            found.append(_links(parsed(file, _Link, cells)))
        except (NotModelledError, UnitError) as error:
            raise MeasuredError(f"{file}: line {number}: {error}") from None
    return found


def _links(row: _Link) -> TimedLinks:
    chunk = row.topology.rpartition("_")[2]
    lanes = [float(each) for each in re.findall(r"[0-9]+(?:\.[0-9]+)?", row.intra_beta_list)]
    near_us, far_us = min(lanes, default=0.0), row.inter_beta
    if near_us <= 0 or far_us <= 0:
        raise NotModelledError("a chunk takes no time")
    return TimedLinks(
        gpus_per_node=row.gpus_per_node,
        nics_per_node=row.nics_per_node,
        chunk_bytes=parse_size(re.sub(r"([KM])B", r" \1iB", chunk)),
        near_s=near_us / 1e6,
        far_s=far_us / 1e6,
        crossing_s=(row.inter_alpha - row.intra_alpha) / 1e6,
        source=row.source,
    )


def scaled(gpu: str, links: Sequence[TimedLinks], nearest: Profiles) -> Profiles | None:
    """Return a profile of `gpu` from `links`, with all other constants from `nearest`.

    It uses the largest chunk, where latencies matter least, of nodes like those of `gpu`; None if
    there are none.
    """
    hardware = GPUS[gpu]
    fitting = [each for each in links if each.gpus_per_node == hardware.domain]
    if not fitting:
        return None
    best = max(fitting, key=lambda each: each.chunk_bytes)
    nic_bytes_per_s = hardware.nic_bytes_per_s / best.nics_per_node
    shared = nearest.shared.changed(
        nvls=0.0,
        link=min(1.0, best.chunk_bytes / best.near_s / hardware.gpu_bytes_per_s),
        nic=min(1.0, best.chunk_bytes / best.far_s / nic_bytes_per_s),
        far_hop_s=best.crossing_s,
    )
    return Profiles(
        gpu=gpu,
        shared=shared,
        systems={},
        publications=tuple(sorted({*nearest.publications, best.source})),
        scaled_from=nearest.gpu,
        errors={},
    )
