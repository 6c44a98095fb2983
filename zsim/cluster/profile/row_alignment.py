"""Shares that products of matrices reach where rows of their operands begin at odd addresses.

Tensor cores are fed by loads of 16 bytes a thread. Where the extent in which an operand is
contiguous is no multiple of that, libraries take kernels of narrower loads (NVIDIA, "Matrix
Multiplication Background User's Guide", on requirements of tensor cores). An operand that lies
along the inner extent loses more than one along the rows or columns of the result.
"""

from dataclasses import dataclass, fields

ROUND_BYTES = 32
"""Rows of a multiple of so many bytes lose nothing: 0 to 1.3 % in the sweeps below."""

SIZES = (2, 4, 8, 16)
"""Bytes that may be the largest power of two in a row that is not round."""


class AlignmentError(ValueError):
    """A constant that cannot be; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Shares of what round rows let products reach, by the largest power of two in a row, in bytes.

    Attributes:
        inner_2, inner_4, inner_8, inner_16: where an operand is contiguous along the inner extent.
        outer_2, outer_4, outer_8, outer_16: where one is along rows or columns of the result.
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
        """Return what a product reaches with rows of so many bytes; 0 bytes are round."""
        return min(self._of("inner", inner_bytes), self._of("outer", outer_bytes))

    def _of(self, along: str, size: int) -> float:
        if size % ROUND_BYTES == 0:
            return 1.0
        # a single byte is loaded no better than two
        found: float = getattr(self, f"{along}_{max(SIZES[0], size & -size)}")
        return found


NAMES: tuple[str, ...] = tuple(field.name for field in fields(Alignment))
"""Constants of alignment, in the order of a file."""
