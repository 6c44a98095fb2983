"""Colours: numbers that are equal for equivalent ranks, communicators and links.

Compute the coarsest partition in which members of a class meet the same classes, by refining
colours until nothing changes (Weisfeiler and Leman 1968). The neighbourhood of an element is a
multiset of colours, kept as a sum of 64-bit mixes; two different ones have the same sum with a
probability of about 2^-64.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zsim_des.network.communicator_placement import Ints, Spread
from zsim_des.network.link_loads import LoadTable

Mixes = npt.NDArray[np.uint64]

OWN, LINK, MEMBER, MEETS, DIVIDES = range(1, 6)
"""Salts, one for each relation between colours."""


SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Constants of splitmix64."""


def mixed(values: Ints | Mixes, salt: int) -> Mixes:
    """Return a pseudorandom 64-bit number for each different value (splitmix64)."""
    found = values.astype(np.uint64)
    found += np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    high = found >> SHIFTS[0]
    found ^= high
    for shift, factor in zip(SHIFTS[1:], FACTORS, strict=True):
        found *= factor
        np.right_shift(found, shift, out=high)
        found ^= high
    return found


def distinct(colours: Mixes) -> int:
    """Return the number of different colours."""
    if not len(colours) or (colours == colours[0]).all():
        return min(1, len(colours))
    ordered = np.sort(colours)
    return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))


def sums(owner: Ints, values: Mixes, count: int) -> Mixes:
    """Return by owner the sum of its values, modulo 2^64."""
    found = np.zeros(count, np.uint64)
    np.add.at(found, owner, values)
    return found


def by_first(colour: Mixes) -> tuple[Ints, list[int], list[int]]:
    """Return the class of each, and by class its first member and size; numbered by the first."""
    if len(colour) and (colour == colour[0]).all():
        return np.zeros(len(colour), np.int64), [0], [len(colour)]
    _, firsts, inverse, counts = np.unique(
        colour, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(firsts)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], firsts[order].tolist(), counts[order].tolist()


class Colours:
    """Colours of ranks, of links, and by group of communicators.

    Each spread has several load tables of its rings, with a different salt each. `host_flows`
    connect only ranks and links.
    """

    def __init__(
        self,
        *,
        traits: Sequence[Ints],
        marks: Mixes,
        spreads: Sequence[Spread],
        rings: Sequence[Sequence[LoadTable]],
        sends: Sequence[tuple[Spread, int, LoadTable]],
        host_flows: Sequence[LoadTable] = (),
    ) -> None:
        """Start with the initial properties of ranks (`traits`) and of links (`marks`)."""
        self.ranks = np.zeros(len(traits[0]), np.uint64)
        for salt, trait in enumerate(traits):
            self.ranks += mixed(trait, 100 + salt)
        self.links = marks
        self._spreads = spreads
        self._rings = [
            [(table, mixed(table.divisor, 200 + salt)) for salt, table in enumerate(tables)]
            for tables in rings
        ]
        self._sends = [
            (spread, offset, table, mixed(table.divisor, 6000 + salt))
            for salt, (spread, offset, table) in enumerate(sends)
        ]
        self._host_flows = host_flows
        self.communicators = self._communicators()

    def refine(self, *, keep_ranks: bool = False) -> None:
        """Refine until stable; with `keep_ranks`, only the links and communicators."""
        count = 0
        while count < (count := distinct(self.ranks) + distinct(self.links)):
            self.links = self._links()
            if not keep_ranks:
                self.ranks = self._ranks()
            self.communicators = self._communicators()

    def divide(self, parts: Ints, *, further: bool) -> None:
        """Divide the classes of ranks by `parts`, and `further` until they are stable again."""
        self.ranks = self.ranks + mixed(parts, DIVIDES)
        self.communicators = self._communicators()
        self.refine(keep_ranks=not further)

    def _communicators(self) -> list[Mixes]:
        found: list[Mixes] = []
        links = mixed(self.links, LINK)
        for spread, tables in zip(self._spreads, self._rings, strict=True):
            total = mixed(self.ranks, MEMBER)[spread.members].sum(axis=1, dtype=np.uint64)
            for table, share in tables:
                meets = mixed(links[table.link] + share, MEETS)
                total += sums(table.owner, meets, len(total))
            found.append(total)
        return found

    def _links(self) -> Mixes:
        total = mixed(self.links, OWN)
        for salt, (tables, colour) in enumerate(zip(self._rings, self.communicators, strict=True)):
            owners = mixed(colour, 1000 + salt)
            for table, share in tables:
                total += sums(table.link, mixed(owners[table.owner] + share, MEETS), len(total))
        for salt, (_, _, table, share) in enumerate(self._sends):
            owners = mixed(self.ranks, 2000 + salt)
            total += sums(table.link, mixed(owners[table.owner] + share, MEETS), len(total))
        for salt, table in enumerate(self._host_flows):
            total += sums(table.link, mixed(self.ranks, 7000 + salt)[table.owner], len(total))
        return total

    def _ranks(self) -> Mixes:
        total = mixed(self.ranks, OWN)
        for salt, (spread, colour) in enumerate(
            zip(self._spreads, self.communicators, strict=True)
        ):
            held = spread.communicator >= 0
            total += np.where(held, mixed(colour, 3000 + salt)[spread.communicator], 0)
        links = mixed(self.links, LINK)
        for salt, (spread, offset, table, share) in enumerate(self._sends):
            peer = spread.peer[offset]
            total += np.where(peer >= 0, mixed(self.ranks, 4000 + salt)[peer], 0)
            meets = mixed(links[table.link] + share, 5000 + salt)
            total += sums(table.owner, meets, len(total))
        for salt, table in enumerate(self._host_flows):
            total += sums(table.owner, mixed(links[table.link], 8000 + salt), len(total))
        return total
