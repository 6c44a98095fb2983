"""Settings of PyTorch's caching allocator, and its constants.

Source: c10/core/AllocatorConfig.h of PyTorch 2.13.0, and the page "CUDA semantics" of its manual.
Settings have the names of `PYTORCH_ALLOC_CONF`.
"""

from dataclasses import dataclass

MIB = 1024 * 1024

BLOCK_BYTES = 512
"""Block sizes are rounded up to a multiple of it."""
SMALL_MAX_BYTES = MIB
"""The largest block of the small pool, in bytes."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Bytes of a segment of the small pool."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Bytes of a segment of the large pool for blocks below `OWN_SEGMENT_MIN_BYTES`."""
OWN_SEGMENT_MIN_BYTES = 10 * MIB
"""Blocks from this size on get a separate segment if no cached block fits."""
OWN_SEGMENT_ROUNDING_BYTES = 2 * MIB
"""Separate segments are rounded up to a multiple of it."""


class AllocatorError(ValueError):
    """Settings that PyTorch rejects, or invalid requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of `PYTORCH_ALLOC_CONF`.

    Attributes:
        expandable_segments: one address range for each pool and stream, in which pages are mapped
            as needed, instead of separate segments.
        max_split_bytes: blocks from this size on are not split, and smaller requests do not get
            them; None for no limit.
        max_non_split_rounding_bytes: a block that may not be split serves requests that are smaller
            by less than this.
        roundup_power2_divisions: sizes are rounded up to one of this number of steps between two
            powers of two; 0 for off. (PyTorch accepts a number for each range of sizes; zsim has
            one.)
        garbage_collection_threshold: once more than this fraction of the device is reserved, old
            free segments are returned before a new one is allocated; 0 for off. (PyTorch does so
            only under `set_per_process_memory_fraction`; the device is then that fraction of it.)
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float = 0.0

    def __post_init__(self) -> None:
        split, rounding = self.max_split_bytes, self.max_non_split_rounding_bytes
        if split is not None and split < LARGE_SEGMENT_BYTES:
            raise AllocatorError(
                f"max_split_bytes: {split} must be at least {LARGE_SEGMENT_BYTES} (20 MiB)"
            )
        threshold = self.garbage_collection_threshold
        if self.expandable_segments and (split is not None or threshold):
            key = "garbage_collection_threshold" if split is None else "max_split_bytes"
            raise AllocatorError(f"{key}: is not simulated together with expandable_segments")
        if rounding < LARGE_SEGMENT_BYTES:
            raise AllocatorError(
                f"max_non_split_rounding_bytes: {rounding} must be at least "
                f"{LARGE_SEGMENT_BYTES} (20 MiB)"
            )
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise AllocatorError(
                f"roundup_power2_divisions: {divisions} must be a power of two, or 0 for off"
            )
        if not 0 <= threshold < 1:
            raise AllocatorError(
                f"garbage_collection_threshold: {threshold} must be at least 0 and less than 1"
            )


def rounded(size_bytes: int, divisions: int) -> int:
    """Return the bytes of the block for a request of `size_bytes`.

    With `divisions` of at least 2, requests of more than `divisions` blocks are rounded up to the
    next of `divisions` equal steps between two powers of two.
    """
    if divisions < 2 or size_bytes <= BLOCK_BYTES * divisions:
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    step = (1 << (size_bytes.bit_length() - 1)) // divisions
    return -(-size_bytes // step) * step


def segment_bytes(block_bytes: int) -> int:
    """Return the bytes of the segment to allocate if no cached block has `block_bytes`."""
    if block_bytes <= SMALL_MAX_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_MIN_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // OWN_SEGMENT_ROUNDING_BYTES) * OWN_SEGMENT_ROUNDING_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSettings:
    """The part of `PYTORCH_ALLOC_CONF` about pinned host memory; None for no limit.

    Attributes:
        max_round_threshold_bytes: larger requests are exact (`pinned_max_round_threshold_mb`).
        max_cached_bytes: larger blocks are neither rounded nor cached
            (`pinned_max_cached_size_mb`).
    """

    max_round_threshold_bytes: int | None = None
    max_cached_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_round_threshold_bytes", "max_cached_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise AllocatorError(f"{name}: {value} must be at least 1, or None for no limit")


def pinned_bytes(size_bytes: int, settings: PinnedSettings) -> int:
    """Return the bytes of the pinned block for a request of `size_bytes`."""
    limits = settings.max_round_threshold_bytes, settings.max_cached_bytes
    if size_bytes < 1 or any(limit is not None and size_bytes > limit for limit in limits):
        return max(0, size_bytes)
    return 1 << (size_bytes - 1).bit_length()
