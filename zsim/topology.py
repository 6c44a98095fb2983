"""A system as its TOML file describes it: a node, its GPUs and NICs, each number with its source.

    [gpu]
    name = "Tesla V100-SXM3-32GB"
    memory = "32 GB"
    source = "NVIDIA, Tesla V100 datasheet"

Every table says where its numbers come from in `source`; a number from elsewhere has its own, in
`KEY_source`. Bandwidths are per direction and say so; a vendor's two-way figure stands beside as
`quoted`. Reading the file is for the package that ships it.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from zsim.cluster import Cluster, Gpu, Link, Rate
from zsim.dtype import DType
from zsim.units import (
    UnitError,
    parse_bandwidth,
    parse_rate,
    parse_size,
    parse_time,
)


class TopologyError(ValueError):
    """A description that cannot be read; the message starts with the key."""


class UnknownTopologyError(TopologyError, LookupError):
    """No topology of that name ships."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise UnitError(f"{value!r} is not a quantity with its unit, in quotes")
    return value


Size = Annotated[int, BeforeValidator(lambda value: parse_size(_text(value)))]
Bandwidth = Annotated[int, BeforeValidator(lambda value: parse_bandwidth(_text(value)))]
FlopRate = Annotated[int, BeforeValidator(lambda value: parse_rate(_text(value)))]
Time = Annotated[int, BeforeValidator(lambda value: parse_time(_text(value)))]
Count = Annotated[int, Field(ge=1, strict=True)]


class _Table(BaseModel):
    """A table of the file; a key that it does not have is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str


class _Rates(_Table):
    """`[gpu.rates.FORMAT]`: the vendor's peak, and what kernels are predicted to reach."""

    peak: FlopRate
    matmul: FlopRate
    elementwise: FlopRate
    matmul_source: str
    elementwise_source: str


class _GpuTable(_Table):
    """`[gpu]`."""

    name: str
    memory: Size
    memory_bandwidth: Bandwidth
    memory_bandwidth_source: str | None = None
    launch: Time = 0
    launch_source: str | None = None
    rates: dict[DType, _Rates]


class _LinkTable(_Table):
    """`[switch]` and `[nic]`: one link. `quoted` is what the vendor prints, for the reader."""

    bandwidth_per_direction: Bandwidth
    quoted: str
    latency: Time
    latency_source: str


class _NodeTable(_Table):
    """`[node]`."""

    gpus: Count
    nics: Count


class _SystemFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    node: _NodeTable
    gpu: _GpuTable
    switch: _LinkTable
    nic: _LinkTable


def cluster_of(name: str, table: dict[str, Any], nodes: int) -> Cluster:
    """`nodes` of the system that `table`, read from TOML, describes.

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line.
        ClusterError: `nodes` is less than 1.
    """
    try:
        system = _SystemFile.model_validate(table)
    except ValidationError as error:
        raise TopologyError(f"{name}: {_first(error)}") from None
    rates = tuple(
        Rate(dtype=dtype, peak=rate.peak, matmul=rate.matmul, elementwise=rate.elementwise)
        for dtype, rate in system.gpu.rates.items()
    )
    return Cluster(
        name=name,
        nodes=nodes,
        gpus_per_node=system.node.gpus,
        gpu=Gpu(
            name=system.gpu.name,
            memory_bytes=system.gpu.memory,
            memory_bytes_per_s=system.gpu.memory_bandwidth,
            rates=rates,
            launch_ps=system.gpu.launch,
        ),
        switch_link=_link(system.switch),
        nics_per_node=system.node.nics,
        nic_link=_link(system.nic),
        cites=tuple(_cites(table)),
    )


def _link(table: _LinkTable) -> Link:
    return Link(bytes_per_s=table.bandwidth_per_direction, latency_ps=table.latency)


def _first(error: ValidationError) -> str:
    """The first fault in one line: where, and what is allowed."""
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key"
        case "missing":
            return f"{where}: missing"
        case _:
            return f"{where}: {fault['msg'].removeprefix('Value error, ')}"


def _cites(table: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Pairs of key and source, as far down as they stand."""
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            found += _cites(value, where)
        elif key == "source":
            found.append((path, value))
        elif key.endswith("_source"):
            found.append((where.removesuffix("_source"), value))
    return found
