"""Time of a kernel by fitted constants: a roofline whose efficiency depends on shape.

A matrix product is cut into tiles, which run on the processors in waves. The last wave may be half
empty, and each tile first fills a pipeline over its inner extent. Libraries choose the tile, and
cut the inner extent if there are few tiles, so the fastest of several choices counts. Operands of
odd extents are loaded in smaller pieces (`apps/zsim_lab/rows/gpu_kinds.py`). NVIDIA describes
it in "Matrix Multiplication Background User's Guide", on tile and wave quantization; the available
tiles and their efficiency are fitted. Attention is spread in the same manner, in rows of 128
queries, with heads padded to a multiple of 32 elements (Dao 2023, "FlashAttention-2", section 3.2,
and its kernels). All other kernels are limited by memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from zsim.cluster.profile.kernels import KernelProfile
from zsim.model.kernel import Kernel, KernelKind, OperandLayout
from zsim.model.token_loads import balanced

EVEN_WAVES = 6
"""With at least this many waves, tiles are spread evenly over the processors."""

SPLITS = (1, 2, 4, 8)
"""Parts into which the inner extent may be cut; their sums are added in fp32."""

SPLIT_WAVES = 2
"""Products are not cut into more tiles than this many waves."""

BLOCK_SCALED = 0.81
"""Speed of grouped float8 products with a scale for 128 elements, relative to one scale. Mean of
0.77 to 0.85: DeepGEMM's README of 2025 has 1,297 and 1,099 TFLOP/s for 4 experts of 8,192 rows on
H800 (N 4,096, K 7,168; N 7,168, K 2,048), 1,288 and 1,093 for 8 of 4,096."""

ROWS, PAD = 128, 32
"""Queries per tile of attention, and the multiple to which heads are padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peak rates of a GPU per second: operations of a format, bytes to and from memory."""

    flops: float
    bytes: float


class Tiling(NamedTuple):
    """A tiling of a product: the tile's constant, its area, tiles, steps, bytes of partial sums."""

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
"""Names of constants, and extents; `product` is the efficiency of the largest."""


@lru_cache(maxsize=4096)
def tilings(batch: int, m: int, n: int, k: int) -> tuple[Tiling, ...]:
    """Return possible tilings of `batch` products of m x k with k x n."""
    return tuple(_tilings(batch, m, n, k))


def _tilings(batch: int, m: int, n: int, k: int) -> Iterator[Tiling]:
    for name, high, wide in TILES:
        for rows, columns in dict.fromkeys(((high, wide), (wide, high))):
            count = batch * ceil(m / rows) * ceil(n / columns)
            for split in SPLITS:
                sums = batch * m * n * 4 * (split + 1) if split > 1 else 0
                yield Tiling(name, rows * columns, count * split, ceil(k / split), sums)


def waves(count: int, processors: float) -> float:
    """Return the waves of `count` tiles on `processors`."""
    exact = count / processors
    return exact if exact > EVEN_WAVES else ceil(exact)


def product_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Return the seconds of a matrix product."""
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
        # narrow loads slow every step, but not the fill of the pipeline
        work = of_one * 2 * area * (steps / aligned + by.product_fill)
        best = min(best, work / (reached * share) + sums / bandwidth)
    return max(best, kernel.bytes / bandwidth)


def grouped_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Return the seconds of the products of experts, whose tiles share the processors as one grid.

    No tile holds rows of two experts, so an expert with few rows leaves most of a tile empty.
    Gradients of weights sum over the rows of an expert, which each tile takes as its steps. The
    efficiency of a tile is that of other products; the inner extent is not cut.
    """
    _, rows, n, k = kernel.shape
    loads = balanced(rows, kernel.shape[0]) if kernel.loads is None else kernel.loads
    sums_rows = kernel.layout is OperandLayout.TN
    scaled = BLOCK_SCALED if kernel.block_scaled else 1.0
    reached = scaled * peaks.flops * by.product / by.processors
    aligned = aligned_share(kernel, by)
    processors = max(1.0, by.processors - kernel.spared)
    best = float("inf")
    for name, high, wide in TILES:
        for tall, broad in dict.fromkeys(((high, wide), (wide, high))):
            count = steps = 0
            for experts, copies in loads.groups:
                if not copies:
                    continue
                area = ceil(n / tall) * ceil(k / broad) if sums_rows else 0
                tiles = experts * (area or ceil(copies / tall) * ceil(n / broad))
                count += tiles
                steps += tiles * (copies if sums_rows else k)
            if not count:
                break
            share = getattr(by, name) if name else 1.0
            inner = steps / count / aligned + by.product_fill
            work = waves(count * kernel.streams, processors) / kernel.streams
            best = min(best, work * 2 * tall * broad * inner / (reached * share))
    moved = kernel.bytes / (peaks.bytes * by.product_memory)
    return moved if best == float("inf") else max(best, moved)


def aligned_share(kernel: Kernel, by: KernelProfile) -> float:
    """Return the speed of a product relative to one with aligned operands."""
    if by.alignment is None:
        return 1.0
    inner_bytes, outer_bytes = kernel.row_bytes
    return by.alignment.share(inner_bytes=inner_bytes, outer_bytes=outer_bytes)


def attention_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Return the seconds of attention whose scores stay on the chip."""
    sequences, heads, _, queries, _, size = kernel.shape
    padded = ceil(size / PAD) * PAD / size
    count = sequences * heads * ceil(queries / ROWS)
    idle = waves(count, by.processors) * by.processors / count
    share = by.share(kernel.kind, backward=kernel.backward)
    if (published := by.published_attention(kernel.version)) is not None:
        share = published.share(kernel.seen_keys, backward=kernel.backward)
    return kernel.executed_flops * padded * idle / (peaks.flops * share)


def fitted_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Return the seconds of `kernel` on a GPU with `peaks`, with the efficiencies of `by`."""
    return by.fixed_s + work_s(kernel, peaks, by) / by.training.share(kernel)


def work_s(kernel: Kernel, peaks: Peaks, by: KernelProfile) -> float:
    """Return the seconds of the work of `kernel` alone on the GPU."""
    match kernel.kind:
        case KernelKind.MATMUL if len(kernel.shape) == 4:
            return product_s(kernel, peaks, by)
        case KernelKind.MATMUL:  # of unknown shape
            moved = kernel.bytes / (peaks.bytes * by.product_memory)
            return max(kernel.flops / (peaks.flops * by.product), moved)
        case KernelKind.GROUPED_MATMUL:
            return grouped_s(kernel, peaks, by)
        case KernelKind.ATTENTION:
            return attention_s(kernel, peaks, by)
        case _:
            share = by.share(kernel.kind, backward=kernel.backward)
            return kernel.bytes / (peaks.bytes * share)
