"""Memory: the book of what hosts allocate and free, its peak, and PyTorch's caching allocator."""

from zsim.allocator.book import Returns, WorstCase, book
from zsim.allocator.peak import Peak, peak, peak_bytes, pools, witness
from zsim.allocator.reserved import (
    capacity_bytes,
    communicators,
    deferred_frees,
    defers,
    handed_out,
    reservations,
    reserve,
)
from zsim.allocator.service import Deferred

__all__ = [
    "Deferred",
    "Peak",
    "Returns",
    "WorstCase",
    "book",
    "capacity_bytes",
    "communicators",
    "deferred_frees",
    "defers",
    "handed_out",
    "peak",
    "peak_bytes",
    "pools",
    "reservations",
    "reserve",
    "witness",
]
