"""Random numbers: the generators of ranks, and with which state of one an operation draws.

A generator has one state at a time, which a draw reads and advances as the host issues it, as in
PyTorch, where the host counts the offset of each kernel. Setup seeds it.
"""

from dataclasses import dataclass
from enum import StrEnum


class Draws(StrEnum):
    """Way in which ranks of the tensor axis draw in a segment that does."""

    ALIKE = "alike"
    """They hold copies of what is masked, and have to draw the same mask."""
    APART = "apart"
    """They hold different parts of it, and draw independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A generator of each rank: ranks that differ along `axes` have other states, others the same.

    Megatron-LM has two (`CudaRNGStatesTracker`, Shoeybi et al. 2019, section 3): the default one,
    seeded alike on the ranks of the tensor axis, and "model-parallel-rng", seeded apart.
    """

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The state of `generator` that an operation draws with: the next one, which it advances.

    With `restores` it is the one that this operation drew with, and nothing advances: so a
    checkpoint is run again (`torch.utils.checkpoint` with `preserve_rng_state`).
    """

    generator: str
    restores: str | None = None
