"""Published speed of later attention kernels; zsim's timed kernels are earlier ones.

A row of queries processes its keys tile by tile. The overhead at both ends, and in tiles that the
mask cuts, equals a fixed number of additional keys; so short sequences are slower.
"""

from dataclasses import dataclass, fields, replace


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

    def with_share(self, share: float) -> "FusedAttention":
        """Return a copy with `share` of the speed."""
        return replace(self, forward=share * self.forward, backward=share * self.backward)

    def share(self, keys: float, *, backward: bool) -> float:
        """Return the fraction of the peak for rows with `keys` keys."""
        reached, fill = (
            (self.backward, self.backward_fill) if backward else (self.forward, self.forward_fill)
        )
        return reached * keys / (keys + fill)


NAMES: tuple[str, ...] = tuple(field.name for field in fields(FusedAttention))
"""Constants of such kernels, in the order of a file."""
