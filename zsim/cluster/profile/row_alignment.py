"""Slowdown of matrix products whose operands have unaligned rows.

Each thread loads 16 bytes at once for tensor cores. If the contiguous extent of an operand is not a
multiple of that, libraries use kernels with narrower loads (NVIDIA, "Matrix Multiplication
Background User's Guide", on requirements of tensor cores). An operand that is contiguous along the
inner extent loses more than one along the rows or columns of the result.
"""

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
"""Constants of alignment, in the order of a file."""
