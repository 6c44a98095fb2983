"""Study files: a base scenario, axes, conditions on combinations, and a goal.

`parse` reads TOML text into a `StudyFile`. The first problem raises a one-line `StudyError` that
names the field, its value and the allowed values.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, ValidationError

from zsim.bounded_text import bounded_toml
from zsim.config_error import line
from zsim.scenario.tables import ScenarioError
from zsim.strategy.config_table import Count, Flag, Positive, Table, Time


class StudyError(ScenarioError):
    """An invalid study. The message is one line: field, value, allowed values."""


class AxisTable(Table):
    """`[[axis]]`: the choices that vary from run to run, in one of three forms.

    The forms are: `field` with `values`; `zip`, which maps fields to lists of equal length that
    vary together; `variants`, which maps names to tables of a scenario. `labels` name the values.
    """

    name: str | None = None
    field: str | None = None
    values: tuple[Any, ...] | None = None
    zip: dict[str, tuple[Any, ...]] | None = None
    variants: dict[str, dict[str, Any]] | None = None
    labels: tuple[str, ...] | None = None


class WhereTable(Table):
    """`[where]`: a combination is run if all conditions in `keep` hold and none in `drop`."""

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class GoalTable(Table):
    """`[goal]`: the quantity to minimize, and the limits that a run must meet.

    `minimize` is "step_time", "cost_per_token", "gpus" or a numeric field of the scenario. If
    `for_each` names an axis, the study selects a best run for each choice on it. `max_slowdown` is
    the ratio to the step time of the fastest run that fits and has the same choice.
    """

    minimize: str = "step_time"
    for_each: str | None = None
    price_per_gpu_hour: Positive | dict[str, Positive] | None = None
    fits: Flag = True
    max_gpus: Count | None = None
    max_step_time: Time | None = None
    max_slowdown: Annotated[float, Strict(), Field(ge=1, allow_inf_nan=False)] | None = None
    min_tokens_per_s: Positive | None = None
    max_cost_per_million_tokens: Positive | None = None
    min_drive_years: Positive | None = None


class StudyFile(Table):
    """A parsed study file. `base` and variants hold scenario tables that are not validated yet."""

    question: Annotated[str, Strict()]
    hold: Literal["global_batch", "nothing"] = "global_batch"
    base: dict[str, Any]
    axis: Annotated[tuple[AxisTable, ...], Field(min_length=1)]
    where: WhereTable = WhereTable()
    goal: GoalTable = GoalTable()


def parse(text: str) -> StudyFile:
    """Return the study in TOML `text`.

    Raises:
        StudyError: the text is not TOML or not a valid study.
    """
    try:
        data = bounded_toml(text)
    except ValueError as error:
        raise StudyError(f"not TOML: {error}") from None
    return from_tables(data)


def from_tables(data: Mapping[str, Any]) -> StudyFile:
    """Return the study in `data`, the tables of a parsed TOML file.

    Raises:
        StudyError: the tables are not a valid study.
    """
    try:
        return StudyFile.model_validate(data)
    except ValidationError as error:
        raise StudyError(line(error.errors(include_url=False), StudyFile)) from None
