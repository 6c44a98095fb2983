"""Adam with its two moments in 8 bits, one fp32 scale for each block of 256 elements.

Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", section 2; `AdamW8bit` of
bitsandbytes 0.45 (`optim/optimizer.py`, `functional.py`). torchao's `AdamW8bit`
(`torchao/optim`) has the same blocks and scales.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar, Final

from zsim.strategy.optimizer_rule import Adam, Tensor

BLOCK: Final = 256
"""Elements of a moment that share a scale: `block_wise` in `Optimizer2State`."""

LEAST: Final = 4096
"""Moments of smaller tensors stay in fp32: `min_8bit_size`."""

SCALE_BYTES: Final = 4
"""Bytes of a scale, and of an element of a moment that stays in fp32."""


def scale_elements(tensors: Iterable[int]) -> int:
    """Return the fp32 numbers that a moment of tensors with these elements has besides its bytes.

    One for each block; for a tensor that stays in fp32 three quarters of its own, since a byte is
    counted for each element of a moment.
    """
    found = 0
    for elements in tensors:
        whole = elements < LEAST
        found += -(-3 * elements // SCALE_BYTES) if whole else -(-elements // BLOCK)
    return found


@cache
def codes(*, signed: bool) -> tuple[float, ...]:
    """Return the values of the 8-bit format, ascending: a dynamic exponent and a linear fraction.

    `create_dynamic_map` of bitsandbytes, with seven exponent bits.
    """
    exponents, found = 7, [0.0, 1.0]
    for exponent in range(exponents):
        fractions = 2 ** (exponent + (0 if signed else 1)) + 1
        edges = [0.1 + 0.9 * number / (fractions - 1) for number in range(fractions)]
        means = [(low + high) / 2 for low, high in pairwise(edges)]
        scale = 10.0 ** (exponent - exponents + 1)
        found += [sign * scale * mean for mean in means for sign in ((1, -1) if signed else (1,))]
    return tuple(sorted(found))


def rounded(moment: Tensor, *, signed: bool) -> None:
    """Round a flat moment in place to the nearest code of its block, times the block's maximum."""
    elements = moment.numel()
    if elements < LEAST:
        return
    table = moment.new_tensor(codes(signed=signed))
    middle = (table[1:] + table[:-1]) / 2
    for start in range(0, elements, BLOCK):
        part = moment[start : start + BLOCK]
        largest = float(part.abs().max())
        if largest:
            places = ((part / largest).unsqueeze(-1) > middle).sum(-1)
            part.copy_(table[places] * largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam8bit(Adam):
    """`AdamW8bit` of bitsandbytes, `adamw_bnb_8bit` of transformers."""

    fused: ClassVar[str] = ""
    torch: ClassVar[dict[str, str]] = {}
    quantized: ClassVar[bool] = True

    @property
    def flops(self) -> int:
        """Return 30: those of Adam, and for each moment 8 comparisons and a product to round it."""
        return super(Adam8bit, self).flops + 18

    def update(
        self,
        gradient: Tensor,
        trained: Tensor,
        states: Sequence[Tensor],
        *,
        rate: float,
        step: float,
    ) -> None:
        """Update as Adam with the moments as they were rounded, then round the new ones."""
        super(Adam8bit, self).update(gradient, trained, states, rate=rate, step=step)
        first, second = states
        rounded(first, signed=True)
        rounded(second, signed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAdam8bit(Adam8bit):
    """`PagedAdamW8bit`: moments in unified memory, which the driver moves to the host if needed.

    zsim counts them on the device, so a training that only fits by paging is said not to fit.
    """
