"""Published speed of later attention kernels; zsim's timed kernels are earlier ones.

A row of queries processes its keys tile by tile. The overhead at both ends, and in tiles that the
mask cuts, equals a fixed number of additional keys; so short sequences are slower.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields


class FusedAttentionError(ValueError):
    """Invalid constant; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """Speed of fused attention kernels with a causal mask.

    Attributes:
        forward, backward: fractions of the peak for a row with infinitely many keys.
        forward_fill, backward_fill: overhead of a row, as a number of additional keys.
    """

    forward: float
    backward: float
    forward_fill: float
    backward_fill: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise FusedAttentionError(
                    f"{field.name}: {getattr(self, field.name)} must be more than 0"
                )

    def share(self, keys: float, *, backward: bool) -> float:
        """Return the fraction of the peak for rows with `keys` keys."""
        reached, fill = (
            (self.backward, self.backward_fill) if backward else (self.forward, self.forward_fill)
        )
        return reached * keys / (keys + fill)


NAMES: tuple[str, ...] = tuple(field.name for field in fields(FusedAttention))
"""Names of the constants, in the order of a file."""

FLASH2_HOPPER = FusedAttention(
    # Shah et al. 2024, "FlashAttention-3" (arXiv 2407.08608), the bars of FlashAttention-2 on an
    # H100 SXM5, heads of 128 elements. Figure 5, forward with mask: 191, 260, 298, 319, 333 and 335
    # TFLOP/s at 512 to 16,384 tokens, which is 353 x keys / (keys + 204) within 3 %, a row seeing
    # half of all keys. Of 989.4:
    forward=0.357,
    forward_fill=204,
    # Figure 6, backward without mask: 214, 260, 291, 310, 318 and 322, which is 329 x keys / (keys
    # + 272) within 1 %. With a mask, backward is assumed to lose as forward does in figure 5, where
    # 378 x keys / (keys + 104) holds without: a factor of 0.933, and 100 more keys.
    backward=0.310,
    backward_fill=372,
)

FLASH2_AMPERE = FusedAttention(
    # Dao 2023, "FlashAttention-2" (arXiv 2307.08691), section 4.1, A100 SXM4: up to 73 % of the
    # peak forward and 63 % backward, without mask; with a mask times 0.933, as above.
    forward=0.681,
    forward_fill=204,
    backward=0.588,
    backward_fill=372,
)

CUDNN_HOPPER = FusedAttention(
    # The bars of cuDNN in the same figures. Forward with mask: 315, 410, 484, 518, 529 and 539
    # TFLOP/s, which is 561 x keys / (keys + 194) within 3 %.
    forward=0.567,
    forward_fill=194,
    # Backward without mask: 305, 408, 465, 499, 518 and 516, which is 542 x keys / (keys + 377)
    # within 3 %; with a mask times 0.905 and 83 more keys, like forward, which without mask is
    # 619 x keys / (keys + 111) within 5 %.
    backward=0.496,
    backward_fill=460,
)

CUDNN_BLACKWELL = FusedAttention(
    # MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json at 4dcaae5: cuDNN through
    # Transformer Engine 2.11 on a B200, heads of 128 elements, fractions of 2,250 TFLOP/s that
    # count masked scores: forward 0.835 and 0.946 (64 and 128 heads, 4,096 tokens), 1.165 and 1.202
    # (16 and 8 heads, 32,768), 0.989 and 1.003 (131,072). Half of the scores are computed: 0.56 x
    # keys / (keys + 530) within 12 %; this is too fast for the longest, which the power limit slows
    # down.
    forward=0.56,
    forward_fill=530,
    # Backward, including recomputed scores: 0.725 and 0.825, 0.872 and 0.955, 0.827 and 0.826, half
    # of these is 0.44 x keys / (keys + 280) within 10 %.
    backward=0.44,
    backward_fill=280,
)

HOPPERS = ("h100", "h100_2025", "h100_2026", "h100_hbm2e", "h100_hbm2e_2025", "h200", "gh200")

FLASH2: Mapping[str, FusedAttention] = {
    "a100": FLASH2_AMPERE,
    **dict.fromkeys(HOPPERS, FLASH2_HOPPER),
}
"""FlashAttention-2, by profile. It does not run on V100; on B200, no values with a mask exist.
"""

CUDNN: Mapping[str, FusedAttention] = {
    **dict.fromkeys(HOPPERS, CUDNN_HOPPER),
    "b200": CUDNN_BLACKWELL,
}
"""cuDNN's attention, by profile."""
