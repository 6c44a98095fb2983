"""Read published times of kernels from the rows of a table.

Three tables are known, by the name of their file and their columns. A row that exceeds the GPU's
peak is excluded with a reason, since its time cannot be what the column claims. No row is excluded
because of a large error.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import AfterValidator, BeforeValidator, Field

from zsim.compute.fitted_model import Peaks
from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind, flash_attention, matmul, streaming
from zsim_lab.rows.csv_rows import (
    Cells,
    CsvRow,
    MaybeWhole,
    MeasuredError,
    NotModelledError,
    Positive,
    Unmodelled,
    Whole,
    must,
    parsed,
    read_rows,
)

PRODUCTS, OPERATORS, PEAKS = "gemm_h100", "operator_times_a100_gh200", "matmul_peaks"

VOCABULARY = 50_304
"""Columns of the last layer in the table of operators: GPT-NeoX's vocabulary, padded to 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Data sheet of a kind of GPU: peaks of 16-bit formats, and multiprocessors."""

    peaks: Peaks
    processors: int


# NVIDIA's data sheets and architecture whitepapers: dense half-precision peak, memory bandwidth,
# streaming multiprocessors. GH200 with 96 GB HBM3 (its source states 120 GB, which is CPU memory).
# H100 with HBM2e according to torchtitan: 2.4 TB/s.
CHIPS = {
    "v100": Chip(peaks=Peaks(flops=125e12, bytes=0.9e12), processors=80),
    "a100": Chip(peaks=Peaks(flops=312e12, bytes=2.039e12), processors=108),
    "h100": Chip(peaks=Peaks(flops=989.4e12, bytes=3.35e12), processors=132),
    "h100_hbm2e": Chip(peaks=Peaks(flops=989.4e12, bytes=2.4e12), processors=132),
    "h200": Chip(peaks=Peaks(flops=989.4e12, bytes=4.8e12), processors=132),
    "gh200": Chip(peaks=Peaks(flops=989.4e12, bytes=4.0e12), processors=132),
    "b200": Chip(peaks=Peaks(flops=2250e12, bytes=8.0e12), processors=148),
    "gb200": Chip(peaks=Peaks(flops=2500e12, bytes=8.0e12), processors=148),
    "gb300": Chip(peaks=Peaks(flops=2500e12, bytes=8.0e12), processors=148),
}
OF_LATER_SOFTWARE = {
    "h100_2025": "h100",
    "h100_2026": "h100",
    "h100_nemo_2025": "h100",
    "h100_hbm2e_2025": "h100_hbm2e",
}
"""Profiles with newer software on the same chip as another profile, and that profile."""


def chip_of(profile: str) -> Chip:
    """Return the chip of the profile `profile`."""
    return CHIPS[OF_LATER_SOFTWARE.get(profile, profile)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One measured time, of one kernel or of several consecutive kernels."""

    file: str
    row: int
    gpu: str
    name: str
    kernels: tuple[Kernel, ...]
    seconds: float
    source: str


def _gpu(text: str) -> str:
    """Return the chip in `text`."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    for name in sorted(CHIPS, key=len, reverse=True):
        if name in plain:
            return name
    raise ValueError(f"gpu {text!r} is not known")


def _extents(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise ValueError(f"best_shape_MxNxK {text!r} is no shape")
    m, n, k = (int(each) for each in found.groups())
    return m, n, k


class _Product(CsvRow):
    gpu: Annotated[str, AfterValidator(_gpu)]
    batch: Whole
    m: Whole
    n: Whole
    k: Whole
    dtype: Annotated[
        str,
        must(
            lambda text: text.startswith("BF16"),
            "dtype {!r}: which products TF32 computes is not said",
        ),
    ]
    time_us_derived: Positive


class _PeakRow(CsvRow):
    dtype: Annotated[str, must(lambda text: text == "bf16", "dtype {!r} is not modelled")]
    accelerator: Annotated[
        str,
        must(lambda text: "PCIe" not in text, "accelerator {!r} has other peaks"),
        must(
            lambda text: "GB200" not in text,
            "accelerator {!r}: one cold product, where the kernels of its sibling were timed warm",
        ),
        AfterValidator(_gpu),
    ]
    best_shape_MxNxK: Annotated[  # noqa: N815  (the column is called so)
        tuple[int, int, int], BeforeValidator(_extents)
    ]
    mamf_tflops: Positive


class _Operator(CsvRow):
    """An operator on `b` sequences of `length` tokens; `dim` wide, over `h` heads and `mp` ranks.

    The last three depend on the operator.
    """

    operator: Annotated[
        str,
        must(lambda text: text not in SEVERAL, "operator {!r}: several kernels that nobody lists"),
        must(lambda text: text in OPERATORS_KNOWN, "operator {!r}: is not modelled"),
    ]
    gpu: Annotated[str, AfterValidator(_gpu)]
    b: Whole
    h: MaybeWhole
    length: Annotated[int, Field(gt=0, alias="l")]
    dim: MaybeWhole
    mp: MaybeWhole
    fwd_us: Positive
    bwd_us: Positive

    def stated(self, column: str) -> int:
        """Return a value of the last three columns, which the operator needs."""
        value: int | None = getattr(self, column)
        if value is None:
            raise NotModelledError(f"{column} '' is not a whole number")
        return value


class Build(Protocol):
    """Function that builds the kernels of an operator from a row."""

    def __call__(self, row: _Operator, *, backward: bool) -> tuple[Kernel, ...]:
        """Return the kernels of backward or of forward."""
        ...


def read(file: str, rows: Iterable[Cells]) -> tuple[list[KernelRow], list[Unmodelled]]:
    """Return the times in the table `file`, and the unusable rows.

    Raises:
        MeasuredError: the table is unknown, or a column is missing.
    """
    if file not in READERS:
        raise MeasuredError(f"{file}: not one of {', '.join(READERS)}")
    return read_rows(file, rows, READERS[file], _within_physics)


def _product(number: int, cells: Cells) -> Iterable[KernelRow]:
    row = parsed(PRODUCTS, _Product, cells)
    yield KernelRow(
        file=PRODUCTS,
        row=number,
        gpu=row.gpu,
        name="product",
        kernels=(matmul(row.m, row.n, row.k, DType.BF16, batch=row.batch),),
        seconds=row.time_us_derived / 1e6,
        source=row.source,
    )


def _peak(number: int, cells: Cells) -> Iterable[KernelRow]:
    row = parsed(PEAKS, _PeakRow, cells)
    m, n, k = row.best_shape_MxNxK
    yield KernelRow(
        file=PEAKS,
        row=number,
        gpu=row.accelerator,
        name="product",
        kernels=(matmul(m, n, k, DType.BF16),),
        seconds=2 * m * n * k / (row.mamf_tflops * 1e12),
        source=row.source,
    )


def _operator(number: int, cells: Cells) -> Iterable[KernelRow]:
    row = parsed(OPERATORS, _Operator, cells)
    for backward, taken_us in ((False, row.fwd_us), (True, row.bwd_us)):
        times = row.bwd_us / row.fwd_us
        if row.operator == "flash_atten" and backward and times < 2:
            reason = f"2.5 times the work of forward in {times:.2f} of its time"
            raise NotModelledError(f"{row.operator}: {reason}")
        yield KernelRow(
            file=OPERATORS,
            row=number,
            gpu=row.gpu,
            name=f"{row.operator}_{'backward' if backward else 'forward'}",
            kernels=OPERATORS_KNOWN[row.operator](row, backward=backward),
            seconds=taken_us / 1e6,
            source=row.source,
        )


SEVERAL = ("RMSlayernorm", "optimizer", "firstStage_optimizer", "middleStage_optimizer")
"""Operators of several unknown kernels."""


def _linear(rows_of_hidden: float, columns_of_hidden: float, cut: str) -> Build:
    """Return the builder of a linear layer; sizes in hidden sizes, ranks split `cut`."""

    def build(row: _Operator, *, backward: bool) -> tuple[Kernel, ...]:
        hidden, ranks = row.stated("dim"), row.stated("mp")
        n = int(rows_of_hidden * hidden) if rows_of_hidden else VOCABULARY
        k = int(columns_of_hidden * hidden)
        n, k = (n // ranks, k) if cut == "rows" else (n, k // ranks)
        tokens = row.b * row.length
        if not backward:
            return (matmul(tokens, n, k, DType.FP16),)
        return (
            matmul(tokens, k, n, DType.FP16, backward=True),
            matmul(n, k, tokens, DType.FP16, backward=True),
        )

    return build


def _scores(*, inner: bool) -> Build:
    """Return the builder of products in plain attention: scores, or `inner`: of softmax."""

    def build(row: _Operator, *, backward: bool) -> tuple[Kernel, ...]:
        heads, length = row.stated("h"), row.length
        size, batch = row.stated("dim") // heads, row.b * heads // row.stated("mp")
        forward = matmul(
            length, size if inner else length, length if inner else size, DType.FP16, batch=batch
        )
        if not backward:
            return (forward,)
        scores = matmul(length, length, size, DType.FP16, batch=batch, backward=True)
        heads_back = matmul(length, size, length, DType.FP16, batch=batch, backward=True)
        return (scores, heads_back) if inner else (heads_back, heads_back)

    return build


def _flash(row: _Operator, *, backward: bool) -> tuple[Kernel, ...]:
    heads = row.stated("h")
    own = heads // row.stated("mp")
    shape = (row.b, own, own, row.length, row.length, row.stated("dim") // heads)
    return (flash_attention(shape, DType.FP16, backward=backward),)


def _moving(
    kind: KernelKind, streams: tuple[int, int], columns: float = 1.0, *, dtype: DType = DType.FP16
) -> Build:
    """Return the builder of a kernel on `columns` hidden sizes per token; 0: vocabulary."""

    def build(row: _Operator, *, backward: bool) -> tuple[Kernel, ...]:
        wide = columns * row.stated("dim") if columns else VOCABULARY
        cut = 1 if kind in UNCUT else row.stated("mp")
        shape = (row.b * row.length, int(wide) // cut)
        return (streaming(kind, shape, dtype, streams=streams[backward], backward=backward),)

    return build


UNCUT = (KernelKind.NORM, KernelKind.ELEMENTWISE, KernelKind.EMBEDDING)
"""Kinds of kernels on whole hidden states, on every rank of a tensor axis."""

OPERATORS_KNOWN: dict[str, Build] = {
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
"""Operators of GPT-NeoX, by name; RoPE rotates queries and keys together."""

READERS: dict[str, Callable[[int, Cells], Iterable[KernelRow]]] = {
    PRODUCTS: _product,
    OPERATORS: _operator,
    PEAKS: _peak,
}


def _within_physics(row: KernelRow) -> None:
    flops = sum(each.executed_flops for each in row.kernels if each.kind.multiplies_matrices)
    peak = CHIPS[row.gpu].peaks.flops
    if flops > peak * row.seconds:
        reach = flops / row.seconds / 1e12
        raise NotModelledError(f"{row.name}: {reach:.0f} TFLOP/s on a peak of {peak / 1e12:.0f}")
