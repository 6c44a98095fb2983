"""Published figures of offload that need no schedule: formulas, copies, CPU kernels and drives.

A row asks with words and numbers, and the answer is in the printed unit. Nothing is simulated here:
rates are those of equal flows that share links (`zsim.compute.host_rate`).
"""

from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from math import exp, log
from typing import TypeVar

from zsim.closed_form import offload_formulas as offload
from zsim.closed_form.offload_formulas import TransformerSize
from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.host_links import HostFlow
from zsim.cluster.host_side import Drives, HostKernel
from zsim.compute.drive import DriveAccess, drive_bytes_per_s
from zsim.compute.host_kernel import host_kernel_ps
from zsim.compute.host_rate import equal_bytes_per_s
from zsim.units import (
    PICOSECONDS_PER_SECOND,
    UnitError,
    parse_bandwidth,
    parse_size,
    parse_time,
)
from zsim_lab.rows.csv_rows import NotModelledError

Values = Mapping[str, object]
"""Values of a row, by key."""
FindNode = Callable[[str], Cluster]
"""Function that returns a packaged node by its name."""

_Found = TypeVar("_Found")

TIB, GIB, GIGA = 2**40, 2**30, 1e9
V100_FLOPS = 70e12
"""Peak of a V100 as assumed by ZeRO-Infinity, section 4."""


def fitted(values: Iterable[float]) -> float:
    """Return the constant nearest to `values` by least squares of logarithms."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))


def rounded(value: float, decimals: int) -> float:
    """Return `value` rounded half up to `decimals` decimals (negative: tens, hundreds, ...)."""
    return float(Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))


def _size(values: Values) -> TransformerSize:
    return TransformerSize(
        layers=_whole(values, "layers"),
        hidden=_whole(values, "hidden"),
        heads=_whole(values, "heads"),
    )


def _needed(values: Values, intensity: float) -> float:
    """Return the GB/s needed for half the peak, on GPUs `times` times as fast as a V100."""
    peak = V100_FLOPS * _whole(values, "times")
    return offload.needed_bytes_per_s(intensity=intensity, share=0.5, peak_flops=peak) / GIGA


FORMULAS: Mapping[str, Callable[[Values], float]] = {
    "model states": lambda row: offload.model_state_bytes(_size(row)) / TIB,
    "activations": lambda row: offload.activation_bytes(_size(row), 64) / TIB,
    "checkpoints": lambda row: offload.checkpoint_bytes(_size(row), 32) / TIB,
    "model state working memory": lambda row: offload.working_state_bytes(_size(row)) / GIB,
    "activation working memory": lambda row: offload.working_activation_bytes(_size(row), 4) / GIB,
    "slow memory": lambda row: 3.0 * _whole(row, "times"),
    "slow memory of all": lambda row: 3.0 * _whole(row, "times") * 512 / 1000,
    "GPU to GPU": lambda row: _needed(row, offload.parameter_intensity(sequences=1, sequence=1024)),
    "peak": lambda row: V100_FLOPS * _whole(row, "times") / 1e15,
    "split": lambda row: float(
        offload.split_gpu_bytes(
            gradients_on_host=_whole(row, "gradients") > 0, update_on_host=_whole(row, "update") > 0
        )
    ),
}
"""Formulas by name; figure 2a has 64 sequences per node, 32 with checkpoints and 4 per GPU."""


def formula_value(values: Values) -> float:
    """Return the value of a formula, in the unit of the table.

    Raises:
        NotModelledError: the formula is unknown.
    """
    return _known(values, "formula", FORMULAS)(values)


COPIES: Mapping[str, tuple[HostFlow, ...]] = {
    "to GPU": (HostFlow.COPY_IN,),
    "from GPU": (HostFlow.COPY_OUT,),
    "both": (HostFlow.COPY_IN, HostFlow.COPY_OUT),
    "drives to GPU": (HostFlow.READ, HostFlow.COPY_IN),
}


def copy_gb_per_s(values: Values, node: FindNode) -> float:
    """Return the GB/s of each of the equal flows of a node, for copies of `size` if given.

    Raises:
        NotModelledError: a value of the row is unknown.
        ClusterError: the node has no such hardware.
    """
    cluster = node(_word(values, "node"))
    flows = dict.fromkeys(_known(values, "direction", COPIES), _whole(values, "gpus"))
    rate = equal_bytes_per_s(cluster, flows)
    size = values.get("size")
    if size and cluster.copies is not None:
        bytes_ = _quantity(values, "size", parse_size)
        latency = Fraction(cluster.copies.latency_ps, PICOSECONDS_PER_SECOND)
        rate = bytes_ / (latency + bytes_ / rate)
    return float(rate) / GIGA


KERNELS: Mapping[str, tuple[HostKernel, ...]] = {
    "adam": (HostKernel.ADAM,),
    "unscale": (HostKernel.UNSCALE,),
    "adam, cast, copy": (HostKernel.ADAM, HostKernel.CAST),
}
"""Consecutive kernels; the last entry also copies 16-bit parameters to one GPU."""


def kernel_s(values: Values, node: FindNode) -> float:
    """Return the seconds of kernels on `sockets` sockets, or on all if it is 0.

    Raises:
        NotModelledError: a value of the row is unknown.
        ClusterError: the node has no such hardware.
    """
    cluster, elements = node(_word(values, "node")), _whole(values, "elements")
    kernels = _known(values, "kernel", KERNELS)
    taken_ps = sum(host_kernel_ps(kernel, elements, cluster) for kernel in kernels)
    sockets = _whole(values, "sockets", least=0)
    if sockets and cluster.host is not None and cluster.host.cpu is not None:
        taken_ps = taken_ps * cluster.host.cpu.sockets // sockets
    seconds = taken_ps / PICOSECONDS_PER_SECOND
    if len(kernels) > 1:
        to_gpu = equal_bytes_per_s(cluster, {HostFlow.COPY_IN: 1})
        seconds += float(offload.HALF * elements / to_gpu)
    return seconds


def drive_gb_per_s(values: Values, node: FindNode) -> float:
    """Return the GB/s of a read or write, to host memory or to a GPU.

    With the path `bounce`, a copy through a host buffer follows each read, without overlap; with
    GDS (`direct`), bytes go straight to the GPU.

    Raises:
        NotModelledError: a value of the row is unknown.
        ClusterError: the node has no such hardware, or no path to a GPU.
    """
    cluster = node(_word(values, "node"))
    drives = cluster.drives
    if values["read"]:
        drives = Drives(
            count=_whole(values, "drives"),
            capacity_bytes=1,
            read_bytes_per_s=_quantity(values, "read", parse_bandwidth),
            write_bytes_per_s=_quantity(values, "write", parse_bandwidth),
            latency_ps=_quantity(values, "latency", parse_time),
        )
    if drives is None:
        raise ClusterError(f"drives: {cluster.name} describes none")
    access = DriveAccess(
        block_bytes=_quantity(values, "block", parse_size),
        queue_depth=_whole(values, "depth"),
        threads=_whole(values, "threads"),
        drives=_whole(values, "drives"),
    )
    writes = _known(values, "direction", {"read": False, "write": True})
    alone = Fraction(drive_bytes_per_s(drives, access, writes=writes))
    path = _known(values, "path", {"host": 0, "direct": 1, "bounce": 2})
    if path == 0:
        return float(alone) / GIGA
    flow = HostFlow.COPY_OUT if writes else HostFlow.COPY_IN
    gpus = _whole(values, "gpus")
    copy = gpus * equal_bytes_per_s(cluster, {flow: gpus})
    return float(min(alone, copy) if path == 1 else 1 / (1 / alone + 1 / copy)) / GIGA


def _word(values: Values, key: str) -> str:
    return str(values[key])


def _whole(values: Values, key: str, *, least: int = 1) -> int:
    value = values[key]
    if not isinstance(value, int) or value < least:
        raise NotModelledError(f"{key}: {value!r} must be a whole number of at least {least}")
    return value


def _known(values: Values, key: str, known: Mapping[str, _Found]) -> _Found:
    value = _word(values, key)
    if value not in known:
        raise NotModelledError(f"{key}: {value!r} must be one of {', '.join(known)}")
    return known[value]


def _quantity(values: Values, key: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(_word(values, key))
    except UnitError as error:
        raise NotModelledError(f"{key}: {error}") from None
