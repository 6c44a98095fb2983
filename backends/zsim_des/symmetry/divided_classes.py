"""Classes of ranks, divided by parts of their roles alone.

One member of each expert group is the busiest. The others wait for it in the same exchanges, so
they stay in one class (docs/adr/0056-large-mixtures-are-folded-further.md).
"""

from collections.abc import Sequence

import numpy as np

from zsim_des.network.communicator_placement import Ints, Spread
from zsim_des.symmetry.refinement import Mixes, by_first, distinct, mixed


def meet_alike(ranks: Mixes, parts: Ints, spreads: Sequence[Spread]) -> bool:
    """Return True if ranks of equal colour and part have peers of equal colour and part."""
    mine = mixed(ranks, 0) + mixed(parts, 1)
    count = distinct(mine)
    for spread in spreads:
        for peer in spread.peer.values():
            theirs = np.where(peer >= 0, mine[peer], 0)
            if np.unique(np.stack([mine, theirs]), axis=1).shape[1] > count:
                return False
    return True


def typical(index_of: Ints, classes: int, groups: Sequence[tuple[Spread, Mixes]]) -> list[int]:
    """Return for each class the first rank with the most common communicators of its ranks."""
    alike = np.zeros(len(index_of), np.uint64)
    for salt, (spread, colour) in enumerate(groups):
        held = spread.communicator >= 0
        alike += np.where(held, mixed(colour, salt)[spread.communicator], 0)
    found: list[int] = []
    for index in range(classes):
        members = np.flatnonzero(index_of == index)
        _, firsts, counts = by_first(alike[members])
        found.append(int(members[firsts[int(np.argmax(counts))]]))
    return found
