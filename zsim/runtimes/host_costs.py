"""Costs of trainers: what the Python around a schedule takes of the host.

A profile says what PyTorch costs a host for each kernel. Trainers of their own modules do more than
call them: random states of checkpoints, views and casts between kernels, hooks, bookkeeping of a
pipeline. That is a time for each pass over a block, whatever there is to compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from zsim.units import parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What a trainer adds to a profile's costs of the host.

    Attributes:
        unit_ps: picoseconds of the host for each forward, recompute or backward of a unit.
        segment_ps: the same for each segment of a unit.
        collective_ps: of the host for each collective; None is what the profile says.
        rests_on: short names of the publications that they were fitted to.
    """

    unit_ps: int = 0
    segment_ps: int = 0
    collective_ps: int | None = None
    rests_on: tuple[str, ...] = ()

    @classmethod
    def read(cls, table: Mapping[str, object]) -> Self:
        """Return the costs in a table: times by `unit`, `segment` and `collective`, `fit_sources`.

        Raises:
            TypeError: `fit_sources` is not a list.
            ValueError: a key is unknown, or a value is not a time.
        """
        if unknown := table.keys() - {*TIMES, "rests_on"}:
            raise ValueError(f"{min(unknown)}: unknown key; must be {', '.join(TIMES)} or rests_on")
        words = table.get("rests_on", [])
        if not isinstance(words, list):
            raise TypeError(f"rests_on: {words!r} must be a list of words")
        times = {name: parse_time(str(table[name])) for name in TIMES if name in table}
        return cls(
            unit_ps=times.get("unit", 0),
            segment_ps=times.get("segment", 0),
            collective_ps=times.get("collective"),
            rests_on=tuple(map(str, words)),
        )


TIMES = ("unit", "segment", "collective")
"""Keys of a file of host costs."""

PLAIN = HostCosts()
"""PyTorch's own wrappers, and every trainer of which nothing is known."""
