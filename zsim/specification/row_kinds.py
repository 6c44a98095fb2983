"""Kinds of rows by the rules that keep them: rows that a rule drops have a separate place.

With a capacity, which rows of a source for an expert are dropped depends on data. So these rows
have one place for each kind: the rows that a set of rules keeps and all others drop. A place of
a kind that a rule drops is zero wherever that rule holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np

from zsim.model.experts import Drops
from zsim.model.model import Model
from zsim.specification.residues import Numbers

RULES_MAX = 4
"""Maximum number of rules; each set of them has a kind of rows."""


@dataclass(frozen=True, slots=True)
class RowKinds:
    """Kinds of rows: for each kind, the rules that keep its rows."""

    kinds: tuple[frozenset[Drops], ...] = (frozenset(),)

    @classmethod
    def of(cls, rules: Iterable[Drops | None]) -> "RowKinds":
        """Return the kinds that rules can tell apart.

        Raises:
            ValueError: there are more than `RULES_MAX` rules.
        """
        known = sorted(
            {each for each in rules if each is not None}, key=lambda each: (each.by, each.capacity)
        )
        if len(known) > RULES_MAX:
            raise ValueError(f"{len(known)} rules that drop rows, at most {RULES_MAX} are followed")
        found = [
            frozenset(rule for rule, own in zip(known, keeps, strict=True) if own)
            for keeps in product((True, False), repeat=len(known))
        ]
        return cls(tuple(kind for kind in found if _exists(kind, known)))

    @property
    def count(self) -> int:
        """The number of kinds; 1 if nothing is dropped."""
        return len(self.kinds)

    def kept(self, rule: Drops | None, places: int) -> Numbers:
        """Return 1 at each of `places` whose rows a rule keeps, and 0 at the others."""
        own = [int(rule is None or rule in kind) for kind in self.kinds]
        return np.tile(np.array(own, np.uint64), places // self.count)


def _exists(kind: frozenset[Drops], rules: Iterable[Drops]) -> bool:
    """Return True if a row can be of a kind: a larger capacity keeps all rows of a smaller one."""
    return all(
        larger in kind
        for smaller in kind
        for larger in rules
        if larger.by is smaller.by and larger.capacity > smaller.capacity
    )


def drop_rules(model: Model) -> dict[str, Drops | None]:
    """Return the rule of each value that holds rows of experts, by name."""
    found: dict[str, Drops | None] = {}
    for unit in model.units:
        for segment in unit.segments:
            if segment.experts:
                names = (*segment.inputs, *(value.name for value in segment.outputs))
                found |= dict.fromkeys(names, segment.drops)
            elif segment.drops is not None:
                sent = (value.name for value in segment.outputs if value.copies)
                found |= dict.fromkeys(sent, segment.drops)
    return found
