"""Slowdown of matrix products whose operands have unaligned rows.

Each thread loads 16 bytes at once for tensor cores. If the contiguous extent of an operand is not a
multiple of that, libraries use kernels with narrower loads (NVIDIA, "Matrix Multiplication
Background User's Guide", on requirements of tensor cores). An operand that is contiguous along the
inner extent loses more than one along the rows or columns of the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

ROUND_BYTES = 32
"""Rows of a multiple of these bytes are aligned: they lose 0 to 1.3 % in the sweeps below."""

SIZES = (2, 4, 8, 16)
"""Largest power of two, in bytes, that may divide an unaligned row."""


class AlignmentError(ValueError):
    """Invalid constant; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Speed relative to aligned rows, by the largest power of two in bytes that divides a row.

    Attributes:
        inner_2, inner_4, inner_8, inner_16: an operand is contiguous along the inner extent.
        outer_2, outer_4, outer_8, outer_16: an operand is contiguous along rows or columns.
    """

    inner_2: float
    inner_4: float
    inner_8: float
    inner_16: float
    outer_2: float
    outer_4: float
    outer_8: float
    outer_16: float

    def __post_init__(self) -> None:
        for along in ("inner", "outer"):
            least = 0.0
            for size in SIZES:
                share: float = getattr(self, f"{along}_{size}")
                if share <= 0 or not least <= share <= 1:
                    allowed = f"{least:g} (that of fewer bytes) to 1" if least else "above 0, to 1"
                    raise AlignmentError(f"{along}_{size}: {share:g}: allowed is {allowed}")
                least = share

    def share(self, *, inner_bytes: int, outer_bytes: int) -> float:
        """Return the relative speed of a product with rows of these bytes; 0 bytes are aligned."""
        return min(self._of("inner", inner_bytes), self._of("outer", outer_bytes))

    def _of(self, along: str, size: int) -> float:
        if size % ROUND_BYTES == 0:
            return 1.0
        # a single byte is loaded like two
        found: float = getattr(self, f"{along}_{max(SIZES[0], size & -size)}")
        return found


NAMES: tuple[str, ...] = tuple(field.name for field in fields(Alignment))
"""Names of the constants of alignment, in the order of a file."""

AMPERE = Alignment(
    # Logs of Anthony et al. 2024, "The Case for Co-Designing Model Architectures with Hardware"
    # (arXiv 2401.14489), github.com/jahatef/TransformerSizing at 81d67396, results: A100, fp16,
    # PyTorch 1.13.1. Medians over those with a multiple of 32 bytes, of 129 products each, 8,192
    # rows high. Inner extents of 14,272 to 14,400 (vocab.out) and of 51,136 to 51,264
    # (vocab_v_sweep.out): 0.283 and 0.290, 0.551 and 0.541, 0.556 and 0.548, 0.899 and 0.887.
    inner_2=0.287,
    inner_4=0.546,
    inner_8=0.552,
    inner_16=0.893,
    # Columns of 51,136 to 51,264 (vocab.out) and 14,272 to 14,400 (vocab_h_sweep.out): 0.275 and
    # 0.278, 0.687 and 0.672 twice, 0.998 and 0.995.
    outer_2=0.277,
    outer_4=0.68,
    outer_8=0.68,
    outer_16=1.0,
)

VOLTA = Alignment(
    # The same on V100, products of plain attention (V100_h_sweep.out, heads of 64 elements or
    # more): rows of an even number of elements are as fast as others, those of an odd number reach
    # 3.9 and 5.0 TFLOP/s, which these fractions of zsim's constants reproduce.
    inner_2=0.034,
    inner_4=1.0,
    inner_8=1.0,
    inner_16=1.0,
    outer_2=0.1,
    outer_4=1.0,
    outer_8=1.0,
    outer_16=1.0,
)

OF_AMPERE = (
    "a100",
    "h100",
    "h100_2025",
    "h100_2026",
    "h100_hbm2e",
    "h100_hbm2e_2025",
    "h200",
    "gh200",
    "b200",
)
"""Profiles that use the published values of A100.

On later chips only rows of 16 bytes were timed: products of plain attention on GH200 take 1 to 1.25
times the time of aligned rows (github.com/DebarghaG/estimate-train-time at 1ac4d5e4, bmm and
baddbmm). Their own instructions need 16 bytes, too (`cp.async.bulk` of the PTX ISA), so other rows
use kernels like those of A100.
"""

ALIGNMENT: Mapping[str, Alignment] = {
    **dict.fromkeys(OF_AMPERE, AMPERE),
    **dict.fromkeys(("v100", "v100_timed"), VOLTA),
}
"""Speed of unaligned rows, by profile."""
