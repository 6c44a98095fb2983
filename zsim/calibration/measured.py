"""Published measurements of collectives: rows of a table in, measurements out, or why not.

Four tables are known, by the name of their file and their columns. Nothing is left out for being
predicted badly; a row that says more than a link can carry is named and left out, since its size or
time is not what the column says.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite

from zsim.calibration.hardware import GPUS, UNNAMED, gpu_in, system_in
from zsim.collective.activity import Collective, Shape
from zsim.collective.tuner import Bandwidths, candidates
from zsim.units import UnitError, parse_size

Row = Mapping[str, str]

STATED_BYTES = 16 * 2**30  # so large that only bandwidth counts

SWEEPS, ONE_NODE = "nccl_tests_sweeps", "collectives_h100_one_node"
ALL_REDUCE, SCALING = "allreduce_h200_b200", "collective_bandwidth_h100_scaling"


class MeasuredError(ValueError):
    """A table that is not what its name says: the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row. `size_bytes` is S of the collective, see zsim.collective.activity.

    Attributes:
        row: line of the file, the header being 1.
        gpu: key of zsim.calibration.hardware.GPUS.
        system: the machine and software that measured it, in one word.
        band: least and most seconds within which a congested cluster stayed, if the row says so.
        nic_bytes_per_s: what one NIC of the system was seen to carry, if the row says so.
    """

    file: str
    row: int
    gpu: str
    system: str
    collective: Collective
    shape: Shape
    size_bytes: int
    seconds: float
    links: Bandwidths
    source: str
    band: tuple[float, float] | None = None
    nic_bytes_per_s: float | None = None

    @property
    def group(self) -> tuple[str, str, str, int]:
        """What is held out together: file, hardware, collective and size of the group."""
        return self.file, self.gpu, self.collective, self.shape.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmodelled:
    """A row that is not predicted, and why."""

    file: str
    row: int
    reason: str


_COLLECTIVES = {str(each): each for each in Collective} | {
    "alltoall": Collective.ALL_TO_ALL,
    "sendrecv": Collective.SEND_RECEIVE,
}


class _RowError(ValueError):
    """Why one row is not modelled."""


def read(file: str, rows: Iterable[Row]) -> tuple[list[Measurement], list[Unmodelled]]:
    """Measurements of the table `file`, and the rows that are none.

    Raises:
        MeasuredError: the table is not known, or a column is missing.
    """
    if file not in READERS:
        raise MeasuredError(f"{file}: not one of {', '.join(READERS)}")
    found: list[Measurement] = []
    left: list[Unmodelled] = []
    for number, row in enumerate(rows, start=2):
        try:
            measurement = READERS[file](number, row)
            _within_physics(measurement)
        except KeyError as missing:
            raise MeasuredError(f"{file}: no column {missing.args[0]!r}") from None
        except _RowError as reason:
            left.append(Unmodelled(file=file, row=number, reason=str(reason)))
        else:
            found.append(measurement)
    return found, left


def _sweep(number: int, row: Row) -> Measurement:
    gpu, ranks = _gpu(row), _whole(row, "n_ranks")
    system, nic = system_in(f"{row['cluster']} {row['nic']}", row["dataset"], gpu)
    shape = _shape(gpu, ranks, _whole(row, "n_nodes"))
    time = "oop_time_us" if row["oop_time_us"] else "ip_time_us"
    return Measurement(
        file=SWEEPS,
        row=number,
        gpu=gpu,
        system=system,
        collective=_collective(row),
        shape=shape,
        size_bytes=_whole(row, "size_bytes"),
        seconds=_positive(row, time) / 1e6,
        links=_links(gpu, nic, shape),
        source=row["source"],
        nic_bytes_per_s=_stated_nic(row["nic"]),
    )


def _stated_nic(text: str) -> float | None:
    """Bytes per second in a note such as "per-NIC busbw 48.8 GB/s implies 400 Gb/s"."""
    found = re.search(r"per-NIC busbw ([0-9]+(?:\.[0-9]+)?) GB/s", text)
    return float(found.group(1)) * 1e9 if found else None


def stated_fabric(row: Measurement) -> Measurement | None:
    """What the row says of one NIC, as a large ring of two ranks on two nodes; None if nothing."""
    if row.nic_bytes_per_s is None:
        return None
    shape = Shape(ranks=2, nodes=2)
    return replace(
        row,
        collective=Collective.ALL_GATHER,
        shape=shape,
        size_bytes=STATED_BYTES,
        seconds=STATED_BYTES / 2 / row.nic_bytes_per_s,
        links=_links(row.gpu, GPUS[row.gpu].nic_bytes_per_s, shape),
        nic_bytes_per_s=None,
    )


def _one_node(number: int, row: Row) -> Measurement:
    gpu, ranks = _gpu(row), _whole(row, "group_size")
    shape = _shape(gpu, ranks, 1)
    return Measurement(
        file=ONE_NODE,
        row=number,
        gpu=gpu,
        system="xla",
        collective=_collective(row),
        shape=shape,
        size_bytes=_whole(row, "total_tensor_bytes"),
        seconds=_positive(row, "time_us") / 1e6,
        links=_links(gpu, GPUS[gpu].nic_bytes_per_s, shape),
        source=row["source"],
    )


def _all_reduce(number: int, row: Row) -> Measurement:
    gpu, ranks = _gpu(row), _whole(row, "n_ranks")
    system, nic = system_in(row["platform"], row["platform"], gpu)
    shape = _shape(gpu, ranks, _whole(row, "n_nodes"))
    return Measurement(
        file=ALL_REDUCE,
        row=number,
        gpu=gpu,
        system=system,
        collective=_collective(row),
        shape=shape,
        size_bytes=_whole(row, "size_bytes"),
        seconds=_positive(row, "time_us_derived") / 1e6,
        links=_links(gpu, nic, shape),
        source=row["source"],
    )


def _scaling(number: int, row: Row) -> Measurement:
    gpu, ranks = _gpu(row), _whole(row, "n_ranks")
    collective = _collective(row)
    shape = _shape(gpu, ranks, _whole(row, "n_nodes"))
    size = _size(row["size"])
    around = 2 if collective is Collective.ALL_REDUCE else 1
    moved = size * around * (ranks - 1) / ranks

    def seconds(column: str) -> float:
        return moved / (_positive(row, column) * 1e9)

    return Measurement(
        file=SCALING,
        row=number,
        gpu=gpu,
        system="congested",
        collective=collective,
        shape=shape,
        size_bytes=size,
        seconds=seconds("bandwidth_GBps"),
        links=_links(gpu, GPUS[gpu].nic_bytes_per_s, shape),
        source=row["source"],
        band=(seconds("p95_GBps"), seconds("p5_GBps")),
    )


READERS: dict[str, Callable[[int, Row], Measurement]] = {
    SWEEPS: _sweep,
    ONE_NODE: _one_node,
    ALL_REDUCE: _all_reduce,
    SCALING: _scaling,
}


def _collective(row: Row) -> Collective:
    name = row["collective"].replace("-", "_")
    if name not in _COLLECTIVES:
        raise _RowError(f"collective {name!r} is not modelled")
    return _COLLECTIVES[name]


def _gpu(row: Row) -> str:
    """The kind of GPU; a row may say that its source does not name one."""
    words = row["gpu"].strip().lower()
    gpu = gpu_in(words)
    if gpu == UNNAMED and words not in {"", "not stated"}:
        raise _RowError(f"gpu {row['gpu']!r} is not known")
    return gpu


def _shape(gpu: str, ranks: int, nodes: int) -> Shape:
    """The communicator over NVSwitch domains: several nodes may be one."""
    hardware = GPUS[gpu]
    domains = -(-ranks // hardware.domain) if hardware.is_rack else nodes
    if not 1 <= domains <= ranks:
        raise _RowError(f"{ranks} ranks on {nodes} nodes")
    return Shape(ranks=ranks, nodes=domains)


def _links(gpu: str, nic_bytes_per_s: int, shape: Shape) -> Bandwidths:
    """Links in use: a GPU sends through the NICs nearest to it, so half a node has half of them.

    A rack has more NICs than a collective has channels: there the channels count.
    """
    hardware = GPUS[gpu]
    used = Fraction(1)
    if not hardware.is_rack:
        used = min(used, shape.ranks_per_node / hardware.domain)
    return Bandwidths(gpu=hardware.gpu_bytes_per_s, node=max(1, int(nic_bytes_per_s * used)))


def _size(text: str) -> int:
    """Bytes in a title such as "256MB (per plot)"; sweeps double, so MB there is MiB."""
    try:
        return parse_size(text.partition(" ")[0].replace("MB", " MiB"))
    except UnitError as error:
        raise _RowError(f"size: {error}") from None


def _whole(row: Row, column: str) -> int:
    value = _positive(row, column)
    if value != int(value):
        raise _RowError(f"{column} {row[column]!r} is not a whole number")
    return int(value)


def _positive(row: Row, column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise _RowError(f"{column} {row[column]!r} is not a number") from None
    if not isfinite(value) or value <= 0:
        raise _RowError(f"{column} {row[column]!r} is not more than 0")
    return value


def _within_physics(row: Measurement) -> None:
    """Refuse a row in which even the leanest algorithm moves more than the GPU's link can."""
    least = min((done.gpu_bytes for _, _, done in candidates(row.collective, row.shape)), default=0)
    if row.seconds * row.links.gpu < row.size_bytes * least:
        limit = row.links.gpu / 1e9
        reach = float(row.size_bytes * least) / row.seconds / 1e9
        raise _RowError(f"{reach:.0f} GB/s on a link of {limit:.0f} GB/s: its size is not S")
