"""A measured node, and its file as `zsim measure` writes it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from zsim.cluster.profile.measured import MeasuredTimes
from zsim.dtype import DType
from zsim.schedule.json import encode_value

NOT_MEASURED = "not measured"
NOBODY = "not measured: one node; the slowest Ethernet that a server has stands for it"
SMALLEST_RATE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDrives:
    """The drive of a folder: rates of large reads and writes, latency of a small read."""

    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHost:
    """Memory and processors of the node; rates are sums over all ranks."""

    memory_bytes: int
    memory_bytes_per_s: float
    cores: int
    adam_bytes_per_s: float
    cast_bytes_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNode:
    """All measurements of a node.

    Attributes:
        title: name of the machine.
        source: date, host and versions.
        ranks: number of ranks measured at once.
        rank_name: name of the device of a rank.
        memory_bytes, memory_bytes_per_s: of a rank; the bandwidth while all ranks copy.
        flops_per_s: the highest rate of matrix products, by format.
        link_bytes_per_s, link_latency_s: bandwidth and latency of a send to another rank.
        collective_share: fraction of its speed that a rank loses during a collective.
        times: the tables of measured times.
    """

    title: str
    source: str
    ranks: int
    rank_name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[DType, float]
    link_bytes_per_s: float
    link_latency_s: float
    collective_share: float
    host: MeasuredHost
    drives: MeasuredDrives | None
    times: MeasuredTimes

    def text(self) -> str:
        """Return the node's file, in TOML."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        source = _quoted(self.source)
        yield "# Written by `zsim measure`. Measure again rather than edit."
        yield f"title = {_quoted(self.title)}"
        yield from ("", "[node]", f"gpus = {self.ranks}", "nics = 1", f"source = {source}")
        yield from ("", "[gpu]", f"name = {_quoted(self.rank_name)}")
        yield f'memory = "{self.memory_bytes} B"'
        yield f"memory_bandwidth = {_rate(self.memory_bytes_per_s)}"
        if self.collective_share:
            yield f'collective_share = "{self.collective_share:.3f}"'
        yield f"source = {source}"
        for dtype, rate in self.flops_per_s.items():
            yield from ("", f"[gpu.rates.{dtype}]")
            flops = f'"{max(rate / 1e9, 1e-6):.6g} GFLOP/s"'
            yield from (f"peak = {flops}", f"matmul = {flops}", f"elementwise = {flops}")
            yield from (f"source = {source}", f"matmul_source = {source}")
            yield f'elementwise_source = "{NOT_MEASURED}: [measured] has the times of kernels"'
        yield from _link("switch", self.link_bytes_per_s, self.link_latency_s, self.source)
        yield from _link("nic", 0.125e9, 50e-6, NOBODY)
        host = self.host
        yield from _link("pcie", host.copy_bytes_per_s, 0.0, self.source)
        yield "gpus_per_switch = 1"
        yield from ("", "[host]", f'memory = "{host.memory_bytes} B"')
        yield from (f"memory_bandwidth = {_rate(host.memory_bytes_per_s)}", f"source = {source}")
        yield from ("", "[cpu]", "sockets = 1", f"cores_per_socket = {host.cores}")
        yield f"adam = {min(1.0, host.adam_bytes_per_s / host.memory_bytes_per_s):.4f}"
        yield f"elementwise = {min(1.0, host.cast_bytes_per_s / host.memory_bytes_per_s):.4f}"
        yield from (f"source = {source}", f"adam_source = {source}")
        yield f"elementwise_source = {source}"
        yield from ("", "[drives]")
        if self.drives is None:
            yield from ("count = 0", f'source = "{NOT_MEASURED}: no folder was given"')
        else:
            yield from ("count = 1", f'capacity = "{self.drives.capacity_bytes} B"')
            yield f"read_bandwidth = {_rate(self.drives.read_bytes_per_s)}"
            yield f"write_bandwidth = {_rate(self.drives.write_bytes_per_s)}"
            yield f"latency = {_time(self.drives.latency_s)}"
            yield from (f"source = {source}", f"rates_source = {source}")
            yield f"latency_source = {source}"
        yield from ("", "[measured]", f"source = {source}")
        tables = cast("dict[str, object]", encode_value(self.times, MeasuredTimes))
        yield from _table("measured", tables)


def _link(name: str, bytes_per_s: float, latency_s: float, source: str) -> Iterator[str]:
    yield from ("", f"[{name}]", f"bandwidth_per_direction = {_rate(bytes_per_s)}")
    yield from ('quoted = "no vendor says it"', f"latency = {_time(latency_s)}")
    yield from (f"source = {_quoted(source)}", f"latency_source = {_quoted(source)}")


def _table(path: str, fields: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of a table: its values, then tables inside it, then lists of tables."""
    inner: list[str] = []
    for key, value in fields.items():
        if isinstance(value, dict):
            table = cast("dict[str, object]", value)
            inner += ["", f"[{path}.{key}]", *_table(f"{path}.{key}", table)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for each in cast("list[dict[str, object]]", value):
                inner += ["", f"[[{path}.{key}]]", *_table(f"{path}.{key}", each)]
        else:
            yield f"{key} = {_value(value)}"
    yield from inner


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.5g}" if value % 1 or abs(value) >= 1e15 else f"{value:.1f}"
        case int():
            return str(value)
        case list():
            return f"[{', '.join(_value(each) for each in cast('list[object]', value))}]"
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _rate(bytes_per_s: float) -> str:
    return f'"{max(SMALLEST_RATE, bytes_per_s) / 1e9:.6f} GB/s"'


def _time(seconds: float) -> str:
    return f'"{seconds * 1e6:.3f} us"'
