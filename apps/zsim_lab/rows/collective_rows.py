"""Read published measurements of collectives from the rows of a table.

Five tables are known, by the name of their file and their columns. No row is excluded because of a
large error. A row whose bandwidth exceeds that of the link is excluded with a reason, since its
size or time cannot be what the column claims.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.algorithm.installed_algorithms import algorithms
from zsim.units import UnitError, parse_size
from zsim_lab.rows.csv_rows import (
    Cells,
    CsvRow,
    MaybePositive,
    MeasuredError,
    NotModelledError,
    Positive,
    Unmodelled,
    Whole,
    parsed,
    read_rows,
)
from zsim_lab.rows.hardware import GPUS, UNNAMED, gpu_in, system_in

STATED_BYTES = 16 * 2**30  # so large that only bandwidth matters
HDR_BYTES_PER_S = 25 * 10**9

SWEEPS, ONE_NODE = "nccl_tests_sweeps", "collectives_h100_one_node"
ALL_REDUCE, SCALING = "allreduce_h200_b200", "collective_bandwidth_h100_scaling"
SINGLE = "collective_bandwidth_single_values"
SCALED = frozenset({SCALING, SINGLE})
"""Tables of single values, mostly on many nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row. `size_bytes` is S of the collective, see zsim.network.algorithm.activity.

    Attributes:
        row: line number in the file; the header is line 1.
        gpu: key of zsim_lab.rows.hardware.GPUS.
        system: the machine and software of the measurement, in one word.
        band: fastest and slowest seconds on a congested cluster; None if not published.
        nic_bytes_per_s: measured bandwidth of one NIC; None if not published.
    """

    file: str
    row: int
    gpu: str
    system: str
    collective: Collective
    shape: GroupShape
    size_bytes: int
    seconds: float
    links: Bandwidths
    source: str
    band: tuple[float, float] | None = None
    nic_bytes_per_s: float | None = None

    @property
    def group(self) -> tuple[str, str, str, int]:
        """Key of rows that are held out together: file, hardware, collective and group size."""
        return self.file, self.gpu, self.collective, self.shape.ranks


_COLLECTIVES = {str(each): each for each in Collective} | {
    "alltoall": Collective.ALL_TO_ALL,
    "sendrecv": Collective.SEND_RECEIVE,
}


def _gpu(text: str) -> str:
    """Return the kind of GPU; a row may state that its source does not name one."""
    gpu = gpu_in(text)
    if gpu == UNNAMED and text.lower() not in {"", "not stated"}:
        raise ValueError(f"gpu {text!r} is not known")
    return gpu


def _collective(text: str) -> Collective:
    name = text.replace("-", "_")
    if name not in _COLLECTIVES:
        raise ValueError(f"collective {name!r} is not modelled")
    return _COLLECTIVES[name]


def _size(text: str) -> int:
    """Return the bytes of a title such as "256MB (per plot)"; sweeps double, so MB means MiB."""
    try:
        return parse_size(text.partition(" ")[0].replace("MB", " MiB"))
    except UnitError as error:
        raise ValueError(f"size: {error}") from None


def _whole(text: str) -> str:
    """Return a whole number without the ".0" of some tables."""
    return text.removesuffix(".0")


def _stated_size(text: str) -> int:
    """Return the bytes of "up to 128 MiB"; `STATED_BYTES` if no size is stated."""
    found = re.search(r"[0-9]+ [KMG]iB", text)
    return parse_size(found.group()) if found else STATED_BYTES


class _Timed(CsvRow):
    gpu: Annotated[str, AfterValidator(_gpu)]
    collective: Annotated[Collective, BeforeValidator(_collective)]


class _SweepRow(_Timed):
    dataset: str
    cluster: str
    nic: str
    n_ranks: Whole
    n_nodes: Whole
    size_bytes: Whole
    oop_time_us: MaybePositive
    ip_time_us: MaybePositive


class _OneNode(_Timed):
    group_size: Whole
    total_tensor_bytes: Whole
    time_us: Positive


class _AllReduce(_Timed):
    platform: str
    n_ranks: Whole
    n_nodes: Whole
    size_bytes: Whole
    time_us_derived: Positive


class _Scaling(_Timed):
    n_ranks: Whole
    n_nodes: Whole
    size: Annotated[int, BeforeValidator(_size)]
    bandwidth_GBps: Positive  # noqa: N815  (columns are called so)
    p95_GBps: Positive  # noqa: N815
    p5_GBps: Positive  # noqa: N815


class _Single(_Timed):
    n_ranks: Annotated[Whole, BeforeValidator(_whole)]
    n_nodes: Whole
    size: Annotated[int, BeforeValidator(_stated_size)]
    busbw_GBps: Positive  # noqa: N815
    note: str


def read(file: str, rows: Iterable[Cells]) -> tuple[list[Measurement], list[Unmodelled]]:
    """Return the measurements of the table `file`, and the unusable rows.

    Raises:
        MeasuredError: the table is unknown, or a column is missing.
    """
    if file not in READERS:
        raise MeasuredError(f"{file}: not one of {', '.join(READERS)}")
    return read_rows(file, rows, lambda *line: (READERS[file](*line),), _within_physics)


def _sweep(number: int, cells: Cells) -> Measurement:
    row = parsed(SWEEPS, _SweepRow, cells)
    system, nic = system_in(f"{row.cluster} {row.nic}", row.dataset, row.gpu)
    shape = _shape(row.gpu, row.n_ranks, row.n_nodes)
    time_us = row.oop_time_us or row.ip_time_us
    if time_us is None:
        raise NotModelledError("oop_time_us and ip_time_us are empty")
    return Measurement(
        file=SWEEPS,
        row=number,
        gpu=row.gpu,
        system=system,
        collective=row.collective,
        shape=shape,
        size_bytes=row.size_bytes,
        seconds=time_us / 1e6,
        links=_links(row.gpu, nic, shape),
        source=row.source,
        nic_bytes_per_s=_stated_nic(row.nic),
    )


def _stated_nic(text: str) -> float | None:
    """Return the bytes per second in a note such as "per-NIC busbw 48.8 GB/s implies 400 Gb/s"."""
    found = re.search(r"per-NIC busbw ([0-9]+(?:\.[0-9]+)?) GB/s", text)
    return float(found.group(1)) * 1e9 if found else None


def stated_fabric(row: Measurement) -> Measurement | None:
    """Return the NIC bandwidth of a row as a large ring of two ranks on two nodes; None without."""
    if row.nic_bytes_per_s is None:
        return None
    shape = GroupShape(ranks=2, nodes=2)
    return replace(
        row,
        collective=Collective.ALL_GATHER,
        shape=shape,
        size_bytes=STATED_BYTES,
        seconds=STATED_BYTES / 2 / row.nic_bytes_per_s,
        links=_links(row.gpu, GPUS[row.gpu].nic_bytes_per_s, shape),
        nic_bytes_per_s=None,
    )


def fastest(row: Measurement) -> Measurement | None:
    """Return the fastest 5 % of runs between nodes as a row; None if not published.

    It represents the fabric without other traffic.
    """
    if row.band is None or row.shape.nodes == 1:
        return None
    return replace(row, system=f"{row.system}_fastest", seconds=row.band[0], band=None)


def _one_node(number: int, cells: Cells) -> Measurement:
    row = parsed(ONE_NODE, _OneNode, cells)
    shape = _shape(row.gpu, row.group_size, 1)
    return Measurement(
        file=ONE_NODE,
        row=number,
        gpu=row.gpu,
        system="xla",
        collective=row.collective,
        shape=shape,
        size_bytes=row.total_tensor_bytes,
        seconds=row.time_us / 1e6,
        links=_links(row.gpu, GPUS[row.gpu].nic_bytes_per_s, shape),
        source=row.source,
    )


def _all_reduce(number: int, cells: Cells) -> Measurement:
    row = parsed(ALL_REDUCE, _AllReduce, cells)
    system, nic = system_in(row.platform, row.platform, row.gpu)
    shape = _shape(row.gpu, row.n_ranks, row.n_nodes)
    return Measurement(
        file=ALL_REDUCE,
        row=number,
        gpu=row.gpu,
        system=system,
        collective=row.collective,
        shape=shape,
        size_bytes=row.size_bytes,
        seconds=row.time_us_derived / 1e6,
        links=_links(row.gpu, nic, shape),
        source=row.source,
    )


def _scaling(number: int, cells: Cells) -> Measurement:
    row = parsed(SCALING, _Scaling, cells)
    shape = _shape(row.gpu, row.n_ranks, row.n_nodes)
    around = 2 if row.collective is Collective.ALL_REDUCE else 1
    moved = row.size * around * (row.n_ranks - 1) / row.n_ranks
    return Measurement(
        file=SCALING,
        row=number,
        gpu=row.gpu,
        system="ultrascale_playbook",
        collective=row.collective,
        shape=shape,
        size_bytes=row.size,
        seconds=moved / (row.bandwidth_GBps * 1e9),
        links=_links(row.gpu, GPUS[row.gpu].nic_bytes_per_s, shape),
        source=row.source,
        band=(moved / (row.p95_GBps * 1e9), moved / (row.p5_GBps * 1e9)),
    )


def _single(number: int, cells: Cells) -> Measurement:
    row = parsed(SINGLE, _Single, cells)
    system, nic = system_in("", _thread(row.source), row.gpu)
    cards = re.search(r"([0-9]+)x HDR per node", row.note)
    shape = _shape(row.gpu, row.n_ranks, row.n_nodes)
    around = 2 if row.collective is Collective.ALL_REDUCE else 1
    moved = row.size * around * (shape.ranks - 1) / shape.ranks
    return Measurement(
        file=SINGLE,
        row=number,
        gpu=row.gpu,
        system=system,
        collective=row.collective,
        shape=shape,
        size_bytes=row.size,
        seconds=moved / (row.busbw_GBps * 1e9),
        links=_links(row.gpu, int(cards.group(1)) * HDR_BYTES_PER_S if cards else nic, shape),
        source=row.source,
    )


def _thread(source: str) -> str:
    """Return the name of the system in an issue: repository and number."""
    found = re.search(r"github\.com/[^/]+/([^/]+)/issues/([0-9]+)", source)
    return "_".join((found.group(1).replace("-", "_"), "issue", found.group(2))) if found else ""


READERS: dict[str, Callable[[int, Cells], Measurement]] = {
    SWEEPS: _sweep,
    ONE_NODE: _one_node,
    ALL_REDUCE: _all_reduce,
    SCALING: _scaling,
    SINGLE: _single,
}


def _shape(gpu: str, ranks: int, nodes: int) -> GroupShape:
    """Return the communicator over NVSwitch domains; several nodes may be one domain."""
    hardware = GPUS[gpu]
    domains = -(-ranks // hardware.domain) if hardware.is_rack else nodes
    if not 1 <= domains <= ranks:
        raise NotModelledError(f"{ranks} ranks on {nodes} nodes")
    return GroupShape(ranks=ranks, nodes=domains)


def _links(gpu: str, nic_bytes_per_s: int, shape: GroupShape) -> Bandwidths:
    """Return the links in use: a GPU uses the nearest NICs, so half a node has half of them.

    A rack has more NICs than a collective has channels, so the channels limit it.
    """
    hardware = GPUS[gpu]
    used = Fraction(1)
    if not hardware.is_rack:
        used = min(used, shape.ranks_per_node / hardware.domain)
    return Bandwidths(
        gpu=hardware.gpu_bytes_per_s,
        node=max(1, int(nic_bytes_per_s * used)),
        pair=nic_bytes_per_s // hardware.nics,
    )


def _within_physics(row: Measurement) -> None:
    """Raise NotModelledError if even the leanest algorithm exceeds the GPU's link."""
    ways = (each.link_bytes(row.collective, row.shape) for each in algorithms().values())
    least = min((done.gpu_bytes for done in ways if done is not None), default=0)
    if row.seconds * row.links.gpu < row.size_bytes * least:
        limit = row.links.gpu / 1e9
        reach = float(row.size_bytes * least) / row.seconds / 1e9
        raise NotModelledError(f"{reach:.0f} GB/s on a link of {limit:.0f} GB/s: its size is not S")
