"""Host time that a trainer's Python code adds to a schedule.

A profile has the host time of PyTorch for each kernel. Trainers run more Python code: random states
of checkpoints, views and casts between kernels, hooks, bookkeeping of a pipeline. This adds a fixed
time to each pass over a block, whatever its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from zsim.units import parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Host time that a trainer adds to the host costs of a profile.

    Attributes:
        unit_ps: picoseconds of the host for each forward, recompute or backward of a unit.
        segment_ps: the same for each segment of a unit.
        collective_ps: picoseconds of the host for each collective; None for the profile's value.
        rests_on: short names of the publications that the times were fitted to.
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
"""Host costs of PyTorch's own wrappers, and of trainers without fitted costs: nothing is added."""
