"""Bytes that decide the time of an all-to-all with unequal blocks.

It lasts as long as its busiest rank sends or receives, or the NICs of its busiest domain carry
bytes. Other ranks and domains wait.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zsim.schedule.operation import AllToAll
from zsim_des.symmetry.classes import CommunicatorClass


class BusiestBytes(NamedTuple):
    """Bytes of the busiest rank, and bytes between the busiest domain and the others.

    Each is of the direction with more of them.
    """

    rank: int
    domain: int


def busiest(
    communicator: CommunicatorClass, exchanges: Iterable[tuple[int, AllToAll]]
) -> BusiestBytes:
    """Return the busiest bytes of `exchanges`, pairs of a rank class and its operation."""
    by_class = dict(exchanges)
    some = next(iter(by_class.values()))
    width = some.wire.size_bytes
    rank = max(each.largest for each in by_class.values())
    return BusiestBytes(rank * width, _between_domains(communicator, by_class) * width)


def _between_domains(communicator: CommunicatorClass, by_class: Mapping[int, AllToAll]) -> int:
    """Return the elements that the busiest domain sends to others, or receives from them."""
    if communicator.domains == 1:
        return 0
    seats = Counter((domain, rank_class) for rank_class, domain in communicator.seats)
    to_domain = {
        rank_class: _by_domain(communicator, exchange) for rank_class, exchange in by_class.items()
    }
    leaving: Counter[int] = Counter()
    coming: Counter[int] = Counter()
    for (domain, rank_class), count in seats.items():
        for other, elements in to_domain[rank_class].items():
            if other != domain:
                leaving[domain] += count * elements
                coming[other] += count * elements
    return max((*leaving.values(), *coming.values()), default=0)


def _by_domain(communicator: CommunicatorClass, exchange: AllToAll) -> Counter[int]:
    """Return the elements that a rank sends to the members in each domain."""
    found: Counter[int] = Counter()
    for (_, domain), elements in zip(communicator.seats, exchange.sent, strict=True):
        found[domain] += elements
    return found
