"""Frozen weights in 4 bits, as `Linear4bit` of bitsandbytes 0.45 keeps them (QLoRA).

Dettmers et al. 2023, "QLoRA: efficient finetuning of quantized LLMs", section 3.
"""

from enum import StrEnum
from typing import Final

BLOCK: Final = 64
"""Elements of a weight that share a scale (`blocksize` of `quantize_4bit`)."""

BLOCK_OF_SCALES: Final = 256
"""Scales that share a scale of their own with double quantization."""

SCALE_BYTES: Final = 4


class Quantization(StrEnum):
    """Formats of frozen weights: 4-bit NormalFloat, and its scales in fp32 or in 8 bits."""

    NF4 = "nf4"
    NF4_DOUBLE = "nf4_double"
    """Double quantization (`bnb_4bit_use_double_quant`): scales are quantized once more."""

    def scale_bytes(self, elements: int) -> int:
        """Return the bytes of the scales of a weight."""
        blocks = -(-elements // BLOCK)
        if self is Quantization.NF4:
            return blocks * SCALE_BYTES
        return blocks + -(-blocks // BLOCK_OF_SCALES) * SCALE_BYTES
