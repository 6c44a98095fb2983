"""Time of a kernel by fitted constants: a roofline whose efficiency depends on shape.

A product of matrices is cut into tiles, and these are spread over the processors in waves: the last
wave may be half empty, and each tile first fills a pipeline over its inner extent. Libraries choose
the tile, and cut the inner extent where there are few; so the fastest of several counts. Operands
of odd extents are loaded in smaller pieces (`zsim/cluster/profile/row_alignment.py`). That is
how NVIDIA describes it ("Matrix Multiplication Background User's Guide", on tile and wave
quantization); which tiles there are, and what each reaches, is fitted. Attention is spread the same
way, in rows of 128 queries, with heads padded to a multiple of 32 elements (Dao 2023,
"FlashAttention-2", section 3.2, and its kernels). All else moves memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from zsim.cluster.profile.kernels import KernelProfile
from zsim.model.kernel import Kernel, KernelKind

EVEN_WAVES = 6
"""From so many waves on tiles even out over the processors."""

SPLITS = (1, 2, 4, 8)
"""Parts into which the inner extent may be cut; their sums are added in fp32."""

SPLIT_WAVES = 2
"""Nothing is cut into more tiles than so many waves."""

ROWS, PAD = 128, 32
"""Queries of a tile of attention, and what heads are padded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peaks of a GPU in a second: operations of a format, bytes to and from memory."""

    flops: float
    bytes: float


class Tiling(NamedTuple):
    """One way to cut a product: the tile's constant, its area, how many, steps, sums in bytes."""

    tile: str
    area: int
    tiles: int
    steps: int
    sums_bytes: int


TILES = (
    ("", 256, 128),
    ("tile_128x128", 128, 128),
    ("tile_128x64", 128, 64),
    ("tile_64x64", 64, 64),
)
"""Names of constants, and extents; the largest is what `product` is of."""


@lru_cache(maxsize=4096)
def tilings(batch: int, m: int, n: int, k: int) -> tuple[Tiling, ...]:
    """Ways to cut `batch` products of m x k with k x n."""
    return tuple(_tilings(batch, m, n, k))


def _tilings(batch: int, m: int, n: int, k: int) -> Iterator[Tiling]:
    for name, high, wide in TILES:
        for rows, columns in dict.fromkeys(((high, wide), (wide, high))):
            count = batch * ceil(m / rows) * ceil(n / columns)
            for split in SPLITS:
                sums = batch * m * n * 4 * (split + 1) if split > 1 else 0
                yield Tiling(name, rows * columns, count * split, ceil(k / split), sums)


def waves(count: int, processors: float) -> float:
    """Waves that so many tiles take on so many processors."""
    exact = count / processors
    return exact if exact > EVEN_WAVES else ceil(exact)


def product_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Seconds of a product of matrices, by what limits it."""
    batch, m, n, k = kernel.shape
    reached = peaks.flops * by.product / by.processors
    aligned = aligned_share(kernel, by)
    processors = max(1.0, by.processors - kernel.spared)
    bandwidth = peaks.bytes * by.product_memory
    best = float("inf")
    for tile, area, tiles, steps, sums in tilings(batch, m, n, k):
        if sums and tiles > SPLIT_WAVES * processors:
            continue
        share = getattr(by, tile) if tile else 1.0
        of_one = waves(tiles * kernel.streams, processors) / kernel.streams
        # narrow loads take longer for each step, not until the first ones come
        work = of_one * 2 * area * (steps / aligned + by.product_fill)
        best = min(best, work / (reached * share) + sums / bandwidth)
    return max(best, kernel.bytes / bandwidth)


def aligned_share(kernel: Kernel, by: KernelProfile) -> float:
    """Return what a product reaches of one whose operands begin at round addresses."""
    if by.alignment is None:
        return 1.0
    inner_bytes, outer_bytes = kernel.row_bytes
    return by.alignment.share(inner_bytes=inner_bytes, outer_bytes=outer_bytes)


def attention_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Seconds of attention whose scores stay on the chip."""
    sequences, heads, _, queries, _, size = kernel.shape
    padded = ceil(size / PAD) * PAD / size
    count = sequences * heads * ceil(queries / ROWS)
    idle = waves(count, by.processors) * by.processors / count
    share = by.share(kernel.kind, backward=kernel.backward)
    if (published := by.published_attention(kernel.version)) is not None:
        share = published.share(kernel.seen_keys, backward=kernel.backward)
    return kernel.executed_flops * padded * idle / (peaks.flops * share)


def fitted_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Seconds of `kernel` on a GPU with `peaks`, of which it reaches what `by` says."""
    return by.fixed_s + work_s(kernel, peaks, by) / by.training.share(kernel)


def work_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Seconds of the work of `kernel` where it runs alone."""
    match kernel.kind:
        case KernelKind.MATMUL if len(kernel.shape) == 4:
            return product_s(kernel, peaks, by)
        case KernelKind.MATMUL:  # of no known shape
            moved = kernel.bytes / (peaks.bytes * by.product_memory)
            return max(kernel.flops / (peaks.flops * by.product), moved)
        case KernelKind.ATTENTION:
            return attention_s(kernel, peaks, by)
        case _:
            share = by.share(kernel.kind, backward=kernel.backward)
            return kernel.bytes / (peaks.bytes * share)
