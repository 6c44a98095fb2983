"""A GPU as described by its TOML file, and the rules for missing numbers.

    name = "Mine"
    memory = "80 GB"
    memory_bandwidth = "3350 GB/s"
    link = "450 GB/s"                   # to the other GPUs of its node, per direction
    power = "700 W"

    [rates.bf16]
    peak = "989 TFLOP/s"                # dense

    [rates.fp8]
    peak = "1979 TFLOP/s"

Those six numbers are enough. A data sheet has no others; each missing number follows from a rule
below, and the sources of a cluster list these rules.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, PlainValidator

from zsim.cluster.cluster import Gpu, Overheads, Rate
from zsim.cluster.files.table import Bandwidth, Count, FileTable, FlopRate, Power, Size, Time
from zsim.cluster.profile.host_launch import EAGER, LaunchCosts
from zsim.dtype import BlockFormat, DType, Multiplied
from zsim.units import parse_ratio

RULE: Final = "a rule of zsim, no figure at hand"

MATMUL_SHARE: Final = Fraction(3, 4)
MATMUL_RULE: Final = (
    f"{RULE}: three quarters of the peak; the largest achieved rates of A100, H100, B200 and GB200 "
    "are 0.70 to 0.87 of theirs: stas00/ml-engineering, compute/accelerator/README.md at 744d01e"
)
FP32_SHARE: Final = Fraction(1, 16)
FP32_RULE: Final = f"{RULE}: a 16th of the 16-bit peak, as of A100; memory limits long before"
FP64_SHARE: Final = Fraction(1, 64)
FP64_RULE: Final = f"{RULE}: a 64th of fp32, as of GPUs for graphics"
ELEMENTWISE_RULE: Final = f"{RULE}: the fp32 peak; memory limits long before"
PEAK_RULE: Final = f"{RULE}: the peak"
TWIN_RULE: Final = f"{RULE}: fp16 has the rates of bf16"

OVERHEADS: Final = Overheads(
    context_bytes=530_000_000, workspace_bytes=32 * 2**20, communicator_bytes=660_000_000
)
OVERHEADS_RULE: Final = f"{RULE}: context and communicator of A100, the workspace of H100"

LAUNCH_RULE: Final = f"{RULE}: PyTorch on the host of an A100, as of every GPU with timed kernels"

MATRIX_FORMATS: Final = (DType.FP8, DType.INT8, DType.FP16, DType.BF16, *BlockFormat)
"""Formats of matrix units, whose products reach a smaller fraction of the peak."""


MULTIPLIED: Final = tuple(each for each in DType if each is not DType.NF4)
FORMATS: Final[dict[str, Multiplied]] = {str(each): each for each in (*MULTIPLIED, *BlockFormat)}


def _format(value: object) -> Multiplied:
    if value not in FORMATS:
        *others, last = map(repr, FORMATS)
        raise ValueError(f"must be {', '.join(others)} or {last}")
    return FORMATS[str(value)]


RateFormat = Annotated[Multiplied, PlainValidator(_format)]
"""Format of operands of kernels, by its name."""


class RatesTable(FileTable):
    """`[gpu.rates.FORMAT]`: the vendor's dense peak, and predicted rates of kernels."""

    peak: FlopRate
    matmul: FlopRate | None = None
    elementwise: FlopRate | None = None
    matmul_source: str | None = None
    elementwise_source: str | None = None
    multiple: Count = 1
    multiple_source: str | None = None


class GpuTable(FileTable):
    """`[gpu]`. `pci_devices` are the PCI device numbers of the GPU.

    `link` is the bandwidth to other GPUs of a node, the sum of all links, and `pcie` that of its
    slot; both are for nodes that lack these numbers. `power` is the power limit; no time depends
    on it. `fp8_any_layout` marks matrix units that multiply fp8 operands in any layout; others need
    both of them contiguous along the inner extent. `evidence` marks a GPU without measured kernels
    or training runs; `nearest` is a kind of GPU that has them, of the same architecture.
    """

    name: str
    memory: Size
    memory_bandwidth: Bandwidth
    memory_bandwidth_source: str | None = None
    link: Bandwidth | None = None
    link_source: str | None = None
    pcie: Bandwidth | None = None
    pcie_source: str | None = None
    power: Power | None = None
    power_source: str | None = None
    evidence: Literal["data sheet only"] | None = None
    nearest: str | None = None
    fp8_any_layout: bool = False
    fp8_any_layout_source: str | None = None
    launch: Time = 0
    launch_source: str | None = None
    collective_share: Annotated[Fraction, BeforeValidator(parse_ratio)] = Fraction(0)
    collective_share_source: str | None = None
    visible_memory: Size | None = None
    visible_memory_source: str | None = None
    context: Size | None = None
    context_source: str | None = None
    workspace: Size | None = None
    workspace_source: str | None = None
    communicator: Size | None = None
    communicator_source: str | None = None
    pci_devices: tuple[str, ...] = ()
    pci_devices_source: str | None = None
    rates: dict[RateFormat, RatesTable]

    def gpu(self, *, is_measured: bool = False) -> Gpu:
        """Return the GPU that the table describes; a measured GPU gets no assumed overheads."""
        return Gpu(
            name=self.name,
            memory_bytes=self.memory,
            memory_bytes_per_s=self.memory_bandwidth,
            rates=tuple(self._rates()),
            launch=self._launch(is_measured=is_measured),
            collective_share=self.collective_share,
            visible_bytes=self.visible_memory,
            fp8_any_layout=self.fp8_any_layout,
            nearest=self.nearest,
            overheads=self._overheads(is_measured=is_measured),
        )

    def _launch(self, *, is_measured: bool) -> LaunchCosts:
        """Return launch costs; from other GPUs if only a data sheet is known."""
        if self._launch_is_absent and not is_measured:
            return EAGER
        return LaunchCosts(
            forward_ps=self.launch, backward_ps=self.launch, operation_ps=self.launch
        )

    @property
    def _launch_is_absent(self) -> bool:
        return self.evidence is not None and not self.launch

    def _overheads(self, *, is_measured: bool) -> Overheads:
        if self._overheads_are_absent and not is_measured:
            return OVERHEADS
        return Overheads(
            context_bytes=self.context or 0,
            workspace_bytes=self.workspace or 0,
            communicator_bytes=self.communicator or 0,
        )

    @property
    def _overheads_are_absent(self) -> bool:
        return self.context is None and self.workspace is None and self.communicator is None

    def _rates(self) -> Iterator[Rate]:
        for dtype, table in self.rates.items():
            yield self._rate(dtype, table)
        if self._fp16_is_absent:
            yield self._rate(DType.FP16, self.rates[DType.BF16])
        if DType.FP32 not in self.rates:
            yield _plain(DType.FP32, self._fp32_peak)
        if DType.FP64 not in self.rates:
            yield _plain(DType.FP64, max(1, int(self._fp32_peak * FP64_SHARE)))

    @property
    def _fp16_is_absent(self) -> bool:
        return DType.FP16 not in self.rates and DType.BF16 in self.rates

    @property
    def _fp32_peak(self) -> int:
        if DType.FP32 in self.rates:
            return self.rates[DType.FP32].peak
        half = self.rates.get(DType.BF16, self.rates.get(DType.FP16))
        fastest = max((rate.peak for rate in self.rates.values()), default=1)
        return max(1, int((half.peak if half else fastest) * FP32_SHARE))

    def _rate(self, dtype: Multiplied, table: RatesTable) -> Rate:
        matmul, elementwise = table.matmul, table.elementwise
        if matmul is None:
            share = MATMUL_SHARE if dtype in MATRIX_FORMATS else Fraction(1)
            matmul = max(1, int(table.peak * share))
        if elementwise is None:
            elementwise = min(table.peak, self._fp32_peak)
        return Rate(
            dtype=dtype,
            peak=table.peak,
            matmul=matmul,
            elementwise=elementwise,
            multiple=table.multiple,
        )

    def rules(self, *, is_measured: bool = False) -> Iterator[tuple[str, str]]:
        """Yield key and rule of the numbers that follow from rules."""
        if self._overheads_are_absent and not is_measured:
            yield "gpu.overheads", OVERHEADS_RULE
        if self._launch_is_absent and not is_measured:
            yield "gpu.launch", LAUNCH_RULE
        for dtype, rate in self.rates.items():
            if rate.matmul is None:
                rule = MATMUL_RULE if dtype in MATRIX_FORMATS else PEAK_RULE
                yield f"gpu.rates.{dtype}.matmul", rule
            if rate.elementwise is None:
                yield f"gpu.rates.{dtype}.elementwise", ELEMENTWISE_RULE
        lacking = [(DType.FP32, FP32_RULE), (DType.FP64, FP64_RULE)]
        missing = [(dtype, rule) for dtype, rule in lacking if dtype not in self.rates]
        if self._fp16_is_absent:
            missing.insert(0, (DType.FP16, TWIN_RULE))
        for dtype, rule in missing:
            for key in ("", ".matmul", ".elementwise"):
                yield f"gpu.rates.{dtype}{key}", rule


def _plain(dtype: DType, peak: int) -> Rate:
    """Return rates of a format that is computed outside matrix units."""
    return Rate(dtype=dtype, peak=peak, matmul=peak, elementwise=peak)
