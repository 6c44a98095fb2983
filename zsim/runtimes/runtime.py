"""A runtime: its options, and the parts that are imported when they are first used."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from zsim.runtimes.config import Config
from zsim.runtimes.search import SearchSpace
from zsim.strategy.runtime_options import RuntimeOptions

if TYPE_CHECKING:
    from zsim.closed_form import DataVolume
    from zsim.model.model import Model
    from zsim.schedule.schedule import Schedule
    from zsim.strategy.strategy import Strategy

Write: TypeAlias = "Callable[[Model, Strategy], Schedule] | str"
"""Returns the schedule in which every rank trains a model with a strategy."""

Volume: TypeAlias = "Callable[[Strategy], DataVolume] | str"
"""Returns the data volumes of a schedule, given only the strategy."""

Need: TypeAlias = "Callable[[Model, Strategy], None] | str | None"
"""Raises ModelError if it can tell, without building it, that a schedule cannot be written."""

NO_SEARCH = SearchSpace()
"""The space of a runtime whose options a search does not vary."""

NO_CONFIG = Config()
"""No configuration files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime whose order of operations is emulated.

    A function or a `SearchSpace` may be given as the text `module:name`, which is imported when it
    is first used.

    Attributes:
        options: class of its options, which also states its features.
        schedule: writes the schedule of a model with a strategy.
        volume: returns the data volumes of the schedule.
        need: checks whether the schedule can be written; None if there is no such check.
        pace: returns the least time of a pipeline (a `Pace` of `zsim_runtimes.stage_times`).
        search: the options that a search varies; by default none.
        config: readers and writers of configuration files; by default none.
        host_costs: the text `package:file` of a TOML file with the times that the trainer takes of
            a host; by default none.
    """

    options: type[RuntimeOptions]
    schedule: Write
    volume: Volume
    need: Need = None
    pace: "Callable[..., float] | str | None" = None
    search: SearchSpace | str = NO_SEARCH
    config: Config = NO_CONFIG
    host_costs: str | None = None
