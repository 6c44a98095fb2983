"""Sizes to measure, from those dominated by launches to those beyond the caches."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Sizes to measure.

    Attributes:
        extents: of matrix products; m, n and k each take all of them.
        elements: of tensors of other kernels.
        attentions: (sequences, heads, tokens, head size).
        tensors: bytes of whole tensors of collectives.
        shapes: (layers, hidden size, sequence length) of reference runs.
        steps: number of steps of each reference run.
        copied_bytes: of a copy that measures memory bandwidth.
        updated: number of parameters of an Adam update.
    """

    extents: tuple[int, ...] = (16, 64, 192, 512, 1024)
    elements: tuple[int, ...] = tuple(2**power for power in range(10, 23, 2))
    attentions: tuple[tuple[int, int, int, int], ...] = (
        (1, 2, 32, 16),
        (2, 4, 64, 32),
        (2, 4, 128, 64),
        (2, 8, 256, 64),
    )
    tensors: tuple[int, ...] = (64, 2**10, 2**14, 2**17, 2**20, 2**22, 2**24, 2**25)
    shapes: tuple[tuple[int, int, int], ...] = (
        (2, 32, 16),
        (2, 64, 64),
        (2, 192, 64),
        (1, 384, 128),
    )
    steps: int = 14
    copied_bytes: int = 2**26
    updated: int = 2**22


LADDER: Final = Ladder()
