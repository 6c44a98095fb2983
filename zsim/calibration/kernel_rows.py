"""Published times of kernels: rows of a table in, kernels with their seconds out, or why not.

Three tables are known, by the name of their file and their columns. A row that says more than the
GPU's peak is named and left out, since its time is not what the column says; nothing is left out
for being predicted badly.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from zsim.calibration.measured import MeasuredError, Row, Unmodelled
from zsim.cost.fitted_time import Peaks
from zsim.dtype import DType
from zsim.kernel import Kernel, KernelKind, flash_attention, matmul, streaming

PRODUCTS, OPERATORS, PEAKS = "gemm_h100", "operator_times_a100_gh200", "matmul_peaks"

VOCABULARY = 50_304
"""Columns of the last layer in the table of operators: GPT-NeoX's tokens, padded to 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of GPU as its vendor describes it: peaks of half formats, processors."""

    peaks: Peaks
    processors: int


# NVIDIA's data sheets and architecture whitepapers: dense half-precision peak, memory bandwidth,
# streaming multiprocessors. GH200 with 96 GB HBM3 (its source says 120 GB, which is CPU memory).
# H100 with HBM2e as torchtitan describes it: 2.4 TB/s.
CHIPS = {
    "v100": Chip(peaks=Peaks(flops=125e12, bytes=0.9e12), processors=80),
    "a100": Chip(peaks=Peaks(flops=312e12, bytes=2.039e12), processors=108),
    "h100": Chip(peaks=Peaks(flops=989.4e12, bytes=3.35e12), processors=132),
    "h100_hbm2e": Chip(peaks=Peaks(flops=989.4e12, bytes=2.4e12), processors=132),
    "h200": Chip(peaks=Peaks(flops=989.4e12, bytes=4.8e12), processors=132),
    "gh200": Chip(peaks=Peaks(flops=989.4e12, bytes=4.0e12), processors=132),
    "b200": Chip(peaks=Peaks(flops=2250e12, bytes=8.0e12), processors=148),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One measured time, of one kernel or of several that follow each other."""

    file: str
    row: int
    gpu: str
    name: str
    kernels: tuple[Kernel, ...]
    seconds: float
    source: str


class Builder(Protocol):
    """Makes the kernels of one way of an operator from a row."""

    def __call__(self, row: Row, *, backward: bool) -> tuple[Kernel, ...]:
        """Those of backward, or of forward."""
        ...


class _RowError(ValueError):
    """Why one row is not modelled."""


def read(file: str, rows: Iterable[Row]) -> tuple[list[KernelRow], list[Unmodelled]]:
    """Times in the table `file`, and the rows that are none.

    Raises:
        MeasuredError: the table is not known, or a column is missing.
    """
    if file not in READERS:
        raise MeasuredError(f"{file}: not one of {', '.join(READERS)}")
    found: list[KernelRow] = []
    left: list[Unmodelled] = []
    for number, row in enumerate(rows, start=2):
        try:
            for each in READERS[file](number, row):
                try:
                    found.append(_within_physics(each))
                except _RowError as reason:
                    left.append(Unmodelled(file=file, row=number, reason=str(reason)))
        except KeyError as missing:
            raise MeasuredError(f"{file}: no column {missing.args[0]!r}") from None
        except _RowError as reason:
            left.append(Unmodelled(file=file, row=number, reason=str(reason)))
    return found, left


def _product(number: int, row: Row) -> Iterable[KernelRow]:
    gpu = _gpu(row["gpu"])
    batch, m, n, k = (_whole(row, name) for name in ("batch", "m", "n", "k"))
    if not row["dtype"].startswith("BF16"):
        raise _RowError(f"dtype {row['dtype']!r}: which products TF32 computes is not said")
    yield KernelRow(
        file=PRODUCTS,
        row=number,
        gpu=gpu,
        name="product",
        kernels=(matmul(m, n, k, DType.BF16, batch=batch),),
        seconds=_positive(row, "time_us_derived") / 1e6,
        source=row["source"],
    )


def _peak(number: int, row: Row) -> Iterable[KernelRow]:
    if row["dtype"] != "bf16":
        raise _RowError(f"dtype {row['dtype']!r} is not modelled")
    if "PCIe" in row["accelerator"]:
        raise _RowError(f"accelerator {row['accelerator']!r} has other peaks")
    extents = re.fullmatch(r"(\d+)x(\d+)x(\d+)", row["best_shape_MxNxK"].strip())
    if extents is None:
        raise _RowError(f"best_shape_MxNxK {row['best_shape_MxNxK']!r} is no shape")
    m, n, k = (int(each) for each in extents.groups())
    yield KernelRow(
        file=PEAKS,
        row=number,
        gpu=_gpu(row["accelerator"]),
        name="product",
        kernels=(matmul(m, n, k, DType.BF16),),
        seconds=2 * m * n * k / (_positive(row, "mamf_tflops") * 1e12),
        source=row["source"],
    )


def _operator(number: int, row: Row) -> Iterable[KernelRow]:
    name = row["operator"]
    if name not in OPERATORS_KNOWN:
        raise _RowError(f"operator {name!r}: {NOT_MODELLED.get(name, 'is not modelled')}")
    build = OPERATORS_KNOWN[name]
    for column, backward in (("fwd_us", False), ("bwd_us", True)):
        if name == "flash_atten" and backward:
            _plausible(row)
        yield KernelRow(
            file=OPERATORS,
            row=number,
            gpu=_gpu(row["gpu"]),
            name=f"{name}_{'backward' if backward else 'forward'}",
            kernels=build(row, backward=backward),
            seconds=_positive(row, column) / 1e6,
            source=row["source"],
        )


def _plausible(row: Row) -> None:
    """Refuse a backward of attention, 2.5 times the work, in less than twice the forward's time."""
    times = _positive(row, "bwd_us") / _positive(row, "fwd_us")
    if times < 2:
        raise _RowError(f"flash_atten: 2.5 times the work of forward in {times:.2f} of its time")


NOT_MODELLED = {
    "RMSlayernorm": "several kernels that nobody lists",
    "optimizer": "several kernels that nobody lists",
    "firstStage_optimizer": "several kernels that nobody lists",
    "middleStage_optimizer": "several kernels that nobody lists",
}


def _linear(rows_of_hidden: float, columns_of_hidden: float, cut: str) -> Builder:
    """A linear layer from so many times the hidden size to so many; which of them ranks share."""

    def build(row: Row, *, backward: bool) -> tuple[Kernel, ...]:
        hidden, ranks = _whole(row, "dim"), _whole(row, "mp")
        n = int(rows_of_hidden * hidden) if rows_of_hidden else VOCABULARY
        k = int(columns_of_hidden * hidden)
        n, k = (n // ranks, k) if cut == "rows" else (n, k // ranks)
        tokens = _whole(row, "b") * _whole(row, "l")
        if not backward:
            return (matmul(tokens, n, k, DType.FP16),)
        return (
            matmul(tokens, k, n, DType.FP16, backward=True),
            matmul(n, k, tokens, DType.FP16, backward=True),
        )

    return build


def _scores(*, inner: bool) -> Builder:
    """Products of plain attention: scores, or with `inner` what is made from their softmax."""

    def build(row: Row, *, backward: bool) -> tuple[Kernel, ...]:
        heads, length = _whole(row, "h"), _whole(row, "l")
        size, batch = _whole(row, "dim") // heads, _whole(row, "b") * heads // _whole(row, "mp")
        forward = matmul(
            length, size if inner else length, length if inner else size, DType.FP16, batch=batch
        )
        if not backward:
            return (forward,)
        scores = matmul(length, length, size, DType.FP16, batch=batch, backward=True)
        heads_back = matmul(length, size, length, DType.FP16, batch=batch, backward=True)
        return (scores, heads_back) if inner else (heads_back, heads_back)

    return build


def _flash(row: Row, *, backward: bool) -> tuple[Kernel, ...]:
    heads, length = _whole(row, "h"), _whole(row, "l")
    own = heads // _whole(row, "mp")
    shape = (_whole(row, "b"), own, own, length, length, _whole(row, "dim") // heads)
    return (flash_attention(shape, DType.FP16, backward=backward),)


def _moving(
    kind: KernelKind, streams: tuple[int, int], columns: float = 1.0, *, dtype: DType = DType.FP16
) -> Builder:
    """A kernel over so many times the hidden size for each token; 0 is the vocabulary."""

    def build(row: Row, *, backward: bool) -> tuple[Kernel, ...]:
        wide = columns * _whole(row, "dim") if columns else VOCABULARY
        cut = 1 if kind in UNCUT else _whole(row, "mp")
        shape = (_whole(row, "b") * _whole(row, "l"), int(wide) // cut)
        return (streaming(kind, shape, dtype, streams=streams[backward], backward=backward),)

    return build


UNCUT = (KernelKind.NORM, KernelKind.ELEMENTWISE, KernelKind.EMBEDDING)
"""Kinds that work on whole hidden states on every rank of a tensor axis."""

OPERATORS_KNOWN: dict[str, Builder] = {
    "linear1": _linear(3, 1, "rows"),
    "linear2": _linear(1, 1, "columns"),
    "linear3": _linear(4, 1, "rows"),
    "linear4": _linear(1, 4, "columns"),
    "linear_final": _linear(0, 1, "rows"),
    "bmm": _scores(inner=True),
    "baddbmm": _scores(inner=False),
    "flash_atten": _flash,
    "layernorm": _moving(KernelKind.NORM, (2, 5)),
    "gelu": _moving(KernelKind.ACTIVATION, (2, 3), 4),
    "res_add": _moving(KernelKind.ELEMENTWISE, (3, 3)),
    "RoPE": _moving(KernelKind.ROTARY, (2, 2), 2),
    "embedding": _moving(KernelKind.EMBEDDING, (2, 2)),
    "parallel_cross_entropy_128": _moving(KernelKind.CROSS_ENTROPY, (3, 2), 0, dtype=DType.FP32),
}
"""Operators of GPT-NeoX, by name: queries and keys are turned together."""

READERS: dict[str, Callable[[int, Row], Iterable[KernelRow]]] = {
    PRODUCTS: _product,
    OPERATORS: _operator,
    PEAKS: _peak,
}


def _gpu(words: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", words.lower())
    for name in sorted(CHIPS, key=len, reverse=True):
        if name in plain and not (name == "b200" and "gb200" in plain):
            return name
    raise _RowError(f"gpu {words!r} is not known")


def _within_physics(row: KernelRow) -> KernelRow:
    flops = sum(each.executed_flops for each in row.kernels if each.kind.multiplies_matrices)
    peak = CHIPS[row.gpu].peaks.flops
    if flops > peak * row.seconds:
        reach = flops / row.seconds / 1e12
        raise _RowError(f"{row.name}: {reach:.0f} TFLOP/s on a peak of {peak / 1e12:.0f}")
    return row


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
