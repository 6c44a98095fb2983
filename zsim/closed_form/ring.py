"""All-reduces as a ring sends them, of one element apart."""

from collections.abc import Iterable

from zsim.schedule.schedule import WireBytes


def all_reduces(
    group: str, elements: Iterable[int], *, ranks: int, size_bytes: int
) -> list[WireBytes]:
    """Volume of one all-reduce of each of `elements`, of `size_bytes` each, over `ranks`."""
    sent = {True: 0, False: 0}
    for count in elements:
        sent[count == 1] += 2 * (ranks - 1) * -(-count // ranks) * size_bytes
    return [
        WireBytes(group=group, collective="all_reduce", bytes=total, scalar=scalar)
        for scalar, total in sent.items()
    ]
