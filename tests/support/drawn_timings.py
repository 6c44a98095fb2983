"""What Hypothesis draws to time a run with: any duration for any operation on any rank."""

from dataclasses import dataclass
from zlib import crc32

from hypothesis import strategies as st

LONG_PS = 10**9
PALETTES = (
    (0,),
    (1,),
    (0, 1, 2),
    (0, 1, 1000),
    (0, 0, 0, LONG_PS),
    (1, 1000, LONG_PS),
)
"""Durations that operations of one kind take; which one is drawn for each."""


@dataclass(frozen=True)
class DrawnTiming:
    """Every duration is one of a palette, by the seed, rank, step and operation."""

    seed: int
    issue: tuple[int, ...]
    kernel: tuple[int, ...]
    communication: tuple[int, ...]

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        return self._one_of(self.issue, f"issue {rank} {step} {operation}")

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        return self._one_of(self.kernel, f"kernel {rank} {step} {operation}")

    def communication_ps(self, step: int, operation: str) -> int:
        return self._one_of(self.communication, f"communication {step} {operation}")

    def _one_of(self, palette: tuple[int, ...], key: str) -> int:
        if len(palette) == 1:
            return palette[0]
        return palette[crc32(f"{self.seed} {key}".encode()) % len(palette)]


def timings() -> st.SearchStrategy[DrawnTiming]:
    """Hosts, kernels and communication that are fast, slow, or anything, each on its own."""
    palette = st.sampled_from(PALETTES)
    return st.builds(
        DrawnTiming,
        seed=st.integers(0, 2**32),
        issue=palette,
        kernel=palette,
        communication=palette,
    )
