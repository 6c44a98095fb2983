"""Memory: the book of what hosts allocate and free, its peak, and PyTorch's caching allocator."""

from zsim.memory.ledger import Returns, WorstCase, book
from zsim.memory.peak import Peak, peak, peak_bytes, pools, witness
from zsim.memory.reserved import (
    capacity_bytes,
    communicators,
    deferred_frees,
    defers,
    handed_out,
    reservations,
    reserve,
)
from zsim.memory.service import Deferred

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
