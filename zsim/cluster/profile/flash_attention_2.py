"""FlashAttention-2, of which publications say what it reaches; timed kernels are earlier ones.

A row of queries takes its keys tile by tile. What it spends beside them, at both ends and in tiles
that the mask halves, is worth so many keys more; so short sequences reach less.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields


class Flash2Error(ValueError):
    """A constant that cannot be; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash2:
    """What it reaches with a causal mask.

    Attributes:
        forward, backward: of the peak, where a row sees endless keys.
        forward_fill, backward_fill: keys for each row, beside those that it sees.
    """

    forward: float
    backward: float
    forward_fill: float
    backward_fill: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise Flash2Error(f"{field.name}: {getattr(self, field.name)} must be more than 0")

    def share(self, keys: float, *, backward: bool) -> float:
        """Of the peak, where a row sees so many keys."""
        reached, fill = (
            (self.backward, self.backward_fill) if backward else (self.forward, self.forward_fill)
        )
        return reached * keys / (keys + fill)


NAMES: tuple[str, ...] = tuple(field.name for field in fields(Flash2))
"""Its constants, in the order of a file."""

HOPPER = Flash2(
    # Shah et al. 2024, "FlashAttention-3" (arXiv 2407.08608), the bars of FlashAttention-2 on an
    # H100 SXM5, heads of 128 elements. Figure 5, forward with mask: 191, 260, 298, 319, 333 and 335
    # TFLOP/s at 512 to 16,384 tokens, which is 353 x keys / (keys + 204) within 3 %, a row seeing
    # half of all keys. Of 989.4:
    forward=0.357,
    forward_fill=204,
    # Figure 6, backward without mask: 214, 260, 291, 310, 318 and 322, which is 329 x keys / (keys
    # + 272) within 1 %. With a mask it is taken to lose what forward does in figure 5, where 378 x
    # keys / (keys + 104) holds without: 0.933 times as much, and 100 keys more.
    backward=0.310,
    backward_fill=372,
)

AMPERE = Flash2(
    # Dao 2023, "FlashAttention-2" (arXiv 2307.08691), section 4.1, A100 SXM4: up to 73 % of the
    # peak forward and 63 % backward, without mask; with it 0.933 times as much, as above.
    forward=0.681,
    forward_fill=204,
    backward=0.588,
    backward_fill=372,
)

PUBLISHED: Mapping[str, Flash2] = {
    "a100": AMPERE,
    **dict.fromkeys(("h100", "h100_hbm2e", "h200", "gh200"), HOPPER),
}
"""By kind of GPU. It does not run on V100; on B200 it was not published with a mask."""
