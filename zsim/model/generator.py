"""Random number generators of ranks, and the generator state that an operation draws with.

A generator has one state at a time. A draw reads and advances it when the host issues the
operation, as in PyTorch, where the host counts the offset of each kernel. Setup seeds it.
"""

from dataclasses import dataclass
from enum import StrEnum


class Draws(StrEnum):
    """How ranks of the tensor axis draw in a segment with random numbers."""

    ALIKE = "alike"
    """They hold copies of the masked tensor, and must draw the same mask."""
    APART = "apart"
    """They hold different parts of it, and draw independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A generator on each rank. Its state differs between ranks along `axes` only.

    Megatron-LM has two (`CudaRNGStatesTracker`, Shoeybi et al. 2019, section 3): the default one,
    with the same seed on all ranks of the tensor axis, and "model-parallel-rng", with different
    seeds.
    """

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The state of `generator` that an operation draws with: the next one, which it advances.

    With `restores`, it is the state that this earlier operation drew with, and nothing advances.
    Running a checkpoint again does this (`torch.utils.checkpoint` with `preserve_rng_state`).
    """

    generator: str
    restores: str | None = None
