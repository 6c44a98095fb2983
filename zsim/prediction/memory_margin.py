"""The margin of memory that a run needs to be predictable."""

TIGHT = 0.97
"""Fraction of the usable memory above which a run is at the edge of memory.

A smaller margin is within the error of predicted peaks (docs/evidence.md). Of five published
runs of 8B that are predicted to use more, three took three to eight times as long as predicted: an
allocator without free memory releases its cache and starts again.
"""


def is_tight(taken_bytes: int, usable_bytes: int) -> bool:
    """Return True if `taken_bytes` leave almost no free memory."""
    return taken_bytes > TIGHT * usable_bytes
