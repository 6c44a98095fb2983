"""`[experts]`: how many copies of tokens reach the experts of each rank.

By default, all experts get equal numbers. `busiest` alone makes the first rank of each group the
busiest one; with a `seed`, counts are drawn. A file has recorded counts.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, Strict

from zsim.config_error import ConfigError
from zsim.model.token_loads import MOST
from zsim.schedule.binding import BALANCED, AnyBinding, CountTrace, Ratio, Zipf
from zsim.strategy.config_table import Table, WholeNumber

AtLeastOne = Annotated[float, Strict(), Field(ge=1, allow_inf_nan=False)]
Counts = tuple[tuple[int, int, int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """Numbers of copies of tokens; the maximum of a rank, in multiples of the mean."""

    binding: AnyBinding = BALANCED
    maximum: float = MOST


EXPERT_COUNTS = ExpertCounts()
"""Equal numbers, and the default maximum."""


class ExpertCountsTable(Table):
    """`[experts]`: numbers of copies of tokens, in multiples of the mean of a rank.

    Attributes:
        busiest: copies that the busiest rank receives.
        seed: of drawn counts, by Zipf's law.
        counts: path of a file of recorded counts.
        rows: its rows, if they are given here.
        maximum: copies that a rank has memory for.
    """

    busiest: AtLeastOne | None = None
    seed: WholeNumber | None = None
    counts: str | None = None
    rows: Counts | None = None
    maximum: AtLeastOne = MOST

    @property
    def settled(self) -> ExpertCounts:
        """The numbers of copies, and their maximum.

        Raises:
            ConfigError: keys contradict each other, or numbers are negative.
        """
        return ExpertCounts(binding=self._binding(), maximum=self.maximum)

    def _binding(self) -> AnyBinding:
        given = [
            name
            for name in ("counts", "rows", "busiest", "seed")
            if getattr(self, name) is not None
        ]
        if self.rows is not None or self.counts is not None:
            if len(given) > 1:
                raise ConfigError(f"experts.{given[0]}: does not go with {given[1]}; remove one")
            if self.rows is None:
                raise ConfigError(f"experts.counts: {self.counts!r} was not read")
            try:
                return CountTrace(rows=self.rows)
            except ValueError as error:
                raise ConfigError(f"experts.{error}") from None
        if self.busiest is None:
            if self.seed is not None:
                raise ConfigError(
                    f"experts.seed: {self.seed} needs busiest, the copies of the busiest rank in "
                    "multiples of the mean"
                )
            return BALANCED
        if self.seed is None:
            return Ratio(busiest=self.busiest)
        return Zipf(seed=self.seed, busiest=self.busiest)

    @property
    def given_key(self) -> str | None:
        """The first key that was given; None if there is none."""
        return next(
            (each for each in type(self).model_fields if each in self.model_fields_set), None
        )
