"""Times of kernels by the formula that docs/compute.md describes, written down once more.

It shares no code with zsim: rows made here say whether a fit finds the constants that made them.
`by` has the constants of a profile, by name; `flops` and `memory` are what the GPU does at most in
a second.
"""

from collections.abc import Mapping
from math import ceil

TILES = {
    "": (256, 128),
    "tile_128x128": (128, 128),
    "tile_128x64": (128, 64),
    "tile_64x64": (64, 64),
}


def rounds(tiles: int, by: Mapping[str, float]) -> float:
    """Return how often the processors are filled; the last time counts as full if there are few."""
    times = tiles / by["processors"]
    return times if times > 6 else ceil(times)


def product(
    m: int, n: int, k: int, by: Mapping[str, float], *, flops: float, memory: float
) -> float:
    """Return the seconds of an (m, k) by (k, n) product of two-byte numbers."""
    bandwidth = memory * by["product_memory"]
    each = flops * by["product"] / by["processors"]
    ways: list[float] = []
    for name, (high, wide) in TILES.items():
        for rows, columns in ((high, wide), (wide, high)):
            for parts in (1, 2, 4, 8):
                tiles = ceil(m / rows) * ceil(n / columns) * parts
                if parts > 1 and tiles > 2 * by["processors"]:
                    continue
                steps = ceil(k / parts) + by["product_fill"]
                work = rounds(tiles, by) * 2 * rows * columns * steps
                sums = 4 * m * n * (parts + 1) if parts > 1 else 0
                ways.append(work / each / (by[name] if name else 1.0) + sums / bandwidth)
    moved = 2 * (m * k + k * n + m * n)
    return by["fixed_s"] + max(min(ways), moved / bandwidth)


def attention(
    heads: int, length: int, by: Mapping[str, float], *, backward: bool, flops: float
) -> float:
    """Return the seconds of causal attention, heads of 64; backward has five products."""
    work = 4 * heads * length * length * 64 / 2 * (2.5 if backward else 1)
    tiles = heads * ceil(length / 128)
    idle = rounds(tiles, by) * by["processors"] / tiles
    share = by["attention_backward" if backward else "attention_forward"]
    return by["fixed_s"] + work * idle / (flops * share)


def moving(size: float, share: str, by: Mapping[str, float], *, memory: float) -> float:
    """Return the seconds of a kernel that moves so many bytes."""
    return by["fixed_s"] + size / (memory * by[share])
