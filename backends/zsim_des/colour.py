"""Colours: numbers by which ranks, communicators and links that look alike are found.

The coarsest partition in which like meets like, by refining colours until nothing changes
(Weisfeiler and Leman 1968). What something meets is a multiset of colours, kept as a sum of 64-bit
mixes; two different ones have the same sum with a probability of about 2^-64.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zsim_des.spread import Ints, Spread
from zsim_des.wiring import Table

Mixes = npt.NDArray[np.uint64]

OWN, LINK, MEMBER, MEETS, PEER = range(1, 6)
"""Salts: what one colour says about another."""


def mixed(values: Ints | Mixes, salt: int) -> Mixes:
    """64-bit numbers that look random, one for each different value (splitmix64)."""
    found = values.astype(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def sums(owner: Ints, values: Mixes, count: int) -> Mixes:
    """By owner the sum of its values, modulo 2^64."""
    found = np.zeros(count, np.uint64)
    np.add.at(found, owner, values)
    return found


def numbered(values: Mixes) -> Ints:
    """Equal values as equal numbers from 0 on."""
    if len(values) and (values == values[0]).all():
        return np.zeros(len(values), np.int64)
    return np.unique(values, return_inverse=True)[1].reshape(-1)


class Colours:
    """Colours of ranks, links, and by group of communicators."""

    def __init__(
        self,
        *,
        traits: Sequence[Ints],
        marks: Ints,
        spreads: Sequence[Spread],
        rings: Sequence[Table],
        sends: Sequence[tuple[Spread, int, Table]],
    ) -> None:
        """Begin with what tells ranks (`traits`) and links (`marks`) apart before they meet."""
        start = np.zeros(len(traits[0]), np.uint64)
        for salt, trait in enumerate(traits):
            start += mixed(trait, 100 + salt)
        self.ranks = numbered(start)
        self.links = marks
        self._spreads = spreads
        self._rings = rings
        self._sends = sends
        self.communicators = self._communicators()

    def refine(self, *, keep_ranks: bool = False) -> None:
        """Split until like meets like; with `keep_ranks` only the links and communicators."""
        count = 0
        while count < (count := self._count()):
            self.links = numbered(self._links())
            if not keep_ranks:
                self.ranks = numbered(self._ranks())
            self.communicators = self._communicators()

    def _count(self) -> int:
        return int(self.ranks.max()) + (int(self.links.max()) if len(self.links) else 0) + 2

    def _communicators(self) -> list[Ints]:
        found: list[Ints] = []
        for spread, ring in zip(self._spreads, self._rings, strict=True):
            total = mixed(self.ranks, MEMBER)[spread.members].sum(axis=1, dtype=np.uint64)
            meets = mixed(mixed(self.links[ring.link], LINK) + mixed(ring.divisor, OWN), MEETS)
            total += sums(ring.owner, meets, len(spread.members))
            found.append(numbered(total))
        return found

    def _links(self) -> Mixes:
        total = mixed(self.links, OWN)
        for salt, (ring, colour) in enumerate(zip(self._rings, self.communicators, strict=True)):
            meets = mixed(mixed(colour[ring.owner], 1000 + salt) + mixed(ring.divisor, OWN), MEETS)
            total += sums(ring.link, meets, len(total))
        for salt, (_, _, table) in enumerate(self._sends):
            total += sums(table.link, mixed(self.ranks[table.owner], 2000 + salt), len(total))
        return total

    def _ranks(self) -> Mixes:
        total = mixed(self.ranks, OWN)
        for salt, (spread, colour) in enumerate(
            zip(self._spreads, self.communicators, strict=True)
        ):
            held = spread.communicator >= 0
            total += np.where(held, mixed(colour[spread.communicator], 3000 + salt), 0)
        for salt, (spread, offset, table) in enumerate(self._sends):
            peer = spread.peer[offset]
            total += np.where(peer >= 0, mixed(self.ranks[peer], 4000 + salt), 0)
            meets = mixed(mixed(self.links[table.link], LINK), 5000 + salt)
            total += sums(table.owner, meets, len(total))
        return total
