"""Kernels of attention of which publications say what they reach; timed kernels are earlier ones.

A row of queries takes its keys tile by tile. What it spends beside them, at both ends and in tiles
that the mask halves, is worth so many keys more; so short sequences reach less.
"""

from dataclasses import dataclass, fields


class FusedAttentionError(ValueError):
    """A constant that cannot be; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """What such kernels reach with a causal mask.

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
                raise FusedAttentionError(
                    f"{field.name}: {getattr(self, field.name)} must be more than 0"
                )

    def share(self, keys: float, *, backward: bool) -> float:
        """Of the peak, where a row sees so many keys."""
        reached, fill = (
            (self.backward, self.backward_fill) if backward else (self.forward, self.forward_fill)
        )
        return reached * keys / (keys + fill)


NAMES: tuple[str, ...] = tuple(field.name for field in fields(FusedAttention))
"""Constants of such kernels, in the order of a file."""
