"""The peak of a pool in the ledger: how many bytes, when, and which buffers were alive."""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.schedule.schedule import Kind
from zsim.trace.trace import LedgerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak of one pool: its bytes, when it occurs, and the live buffers, largest first."""

    pool: str
    bytes: int
    operation: str
    step: int
    by_kind: tuple[tuple[Kind, int], ...]
    alive: tuple[tuple[str, int], ...]


def pools(entries: Iterable[LedgerEntry]) -> tuple[str, ...]:
    """Return the pools in the ledger, in order of first use."""
    return tuple(dict.fromkeys(entry.pool for entry in entries))


def peak_bytes(entries: Iterable[LedgerEntry], pool: str) -> int:
    """Return the largest number of live bytes in `pool`."""
    alive = largest = 0
    for entry in entries:
        if entry.pool == pool:
            alive += entry.change_bytes
            if alive > largest:  # noqa: PLR1730  (`max` takes twice as long)
                largest = alive
    return largest


def kept_bytes(entries: Iterable[LedgerEntry], pool: str) -> int:
    """Return the largest number of live bytes in `pool`, without buffers of collectives."""
    return peak_bytes((each for each in entries if each.kind is not Kind.COMMUNICATION), pool)


def peak(entries: tuple[LedgerEntry, ...], pool: str) -> Peak:
    """Return the first time that the ledger of `pool` reaches its peak."""
    return witness(entries, pool, peak_bytes(entries, pool) - 1)


def witness(entries: Iterable[LedgerEntry], pool: str, capacity_bytes: int) -> Peak:
    """Return the first time that live bytes of `pool` exceed `capacity_bytes`, or else the end."""
    alive: dict[str, int] = {}
    kinds: dict[str, Kind] = {}
    total, operation, step = 0, "", 0
    for entry in entries:
        if entry.pool != pool:
            continue
        kinds[entry.buffer] = entry.kind
        alive[entry.buffer] = alive.get(entry.buffer, 0) + entry.change_bytes
        total += entry.change_bytes
        if total > capacity_bytes:
            operation, step = entry.operation, entry.step
            break
    by_kind = dict.fromkeys(Kind, 0)
    for name, size in alive.items():
        by_kind[kinds[name]] += size
    return Peak(
        pool=pool,
        bytes=total,
        operation=operation,
        step=step,
        by_kind=tuple(by_kind.items()),
        alive=tuple(sorted(((n, s) for n, s in alive.items() if s), key=lambda item: -item[1])),
    )
