"""Formulas of ZeRO-Offload and ZeRO-Infinity: bytes of model states and the efficiency of a GPU.

Sources: ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840), sections 3 to 5; ZeRO-Infinity
(Rajbhandari et al. 2021, arXiv 2104.07857), sections 3 to 6.
"""

from dataclasses import dataclass

HALF, FULL = 2, 4
"""Bytes of a 16-bit and of an fp32 element."""

ADAM_STATES = 3 * FULL
"""Bytes of the fp32 value, momentum and variance of one parameter."""

ADAM_TRAFFIC = 28
"""Host memory traffic of Adam per parameter, in bytes: 4 fp32 tensors read, 3 written."""


def split_gpu_bytes(*, gradients_on_host: bool, update_on_host: bool) -> int:
    """Return the bytes per parameter, of 16, that remain on the GPU in ZeRO-Offload's table 1.

    fp32 states are next to the update, fp16 parameters next to forward and backward.
    """
    states = 0 if update_on_host else ADAM_STATES
    return HALF + (0 if gradients_on_host else HALF) + states


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSize:
    """Size of a transformer as in ZeRO-Infinity: blocks, width, heads, tokens of a sequence."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 1024


def parameters(size: TransformerSize) -> int:
    """Return the parameters of the linear layers of all blocks (ZeRO-Infinity, equation 1)."""
    return 12 * size.layers * size.hidden**2


def step_flops(size: TransformerSize, tokens: float) -> float:
    """Return the FLOPs of a step with `tokens` tokens: forward, recomputation and backward.

    2 x 4 for each parameter and token (before equation 7), since backward counts twice.
    """
    return 8 * parameters(size) * tokens


def model_state_bytes(size: TransformerSize) -> int:
    """Return 20 bytes per parameter: 16-bit value and gradient, four fp32 tensors (equation 2)."""
    return 20 * parameters(size)


def activation_bytes(size: TransformerSize, sequences: int) -> int:
    """Return the activation bytes of all blocks for `sequences` sequences, without recomputation.

    It is `working_activation_bytes` times the number of blocks.
    """
    return size.layers * working_activation_bytes(size, sequences)


def checkpoint_bytes(size: TransformerSize, sequences: int, *, interval: int = 1) -> int:
    """Return the bytes of checkpoints of `sequences`, one per `interval` blocks (equation 3)."""
    return 2 * sequences * size.sequence * size.hidden * size.layers // interval


def working_state_bytes(size: TransformerSize, *, tiles: int = 1) -> int:
    """Return bytes of the largest operator, hidden to 4 x hidden, and its gradient (equation 4).

    With tiling, only one tile is in memory at a time (section 5.1.3).
    """
    return 4 * size.hidden * 4 * size.hidden // tiles


def working_activation_bytes(size: TransformerSize, sequences: int, *, interval: int = 1) -> int:
    """Return the bytes of activations between two checkpoints (equation 5)."""
    each = 16 * size.hidden + 2 * size.heads * size.sequence
    return sequences * size.sequence * interval * each


def parameter_intensity(*, sequences: int, sequence: int) -> float:
    """Return FLOPs per byte of parameters and gradients moved (equation 9)."""
    return float(sequences * sequence)


def optimizer_intensity(*, sequences: int, sequence: int) -> float:
    """Return FLOPs per byte of optimizer states moved (equation 10)."""
    return sequences * sequence / 4


def checkpoint_intensity(*, hidden: int, interval: int = 1) -> float:
    """Return FLOPs per byte of checkpoints moved (equation 11)."""
    return 24.0 * hidden * interval


def efficiency(*, intensity: float, bytes_per_s: float, peak_flops: float) -> float:
    """Return the share of its peak that a GPU reaches if nothing overlaps (equation 6)."""
    reached = intensity * bytes_per_s
    return reached / (reached + peak_flops)


def needed_bytes_per_s(*, intensity: float, share: float, peak_flops: float) -> float:
    """Return the bandwidth at which a GPU reaches a `share` of its peak, if nothing overlaps."""
    return share * peak_flops / ((1 - share) * intensity)
