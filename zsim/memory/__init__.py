"""Memory: a ledger of allocations and frees, its peak, and PyTorch's caching allocator."""

from zsim.memory.ledger import AtOnce, Returns, WorstCase, memory_ledger
from zsim.memory.peak import Peak, kept_bytes, peak, peak_bytes, pools, witness
from zsim.memory.rank_memory import MemoryWait, Pending, RankMemory
from zsim.memory.reserved import (
    PAGEABLE,
    capacity_bytes,
    communicators,
    deferred_frees,
    handed_out,
    is_pinned,
    needed_bytes,
    node_bytes,
    reservations,
    reserve,
)
from zsim.memory.service import Deferred

__all__ = [
    "PAGEABLE",
    "AtOnce",
    "Deferred",
    "MemoryWait",
    "Peak",
    "Pending",
    "RankMemory",
    "Returns",
    "WorstCase",
    "capacity_bytes",
    "communicators",
    "deferred_frees",
    "handed_out",
    "is_pinned",
    "kept_bytes",
    "memory_ledger",
    "needed_bytes",
    "node_bytes",
    "peak",
    "peak_bytes",
    "pools",
    "reservations",
    "reserve",
    "witness",
]
