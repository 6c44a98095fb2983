"""Study files: a base, axes, which combinations are dropped, and what is sought.

`parse` reads TOML text into a `StudyFile`. What is wrong becomes one `StudyError` of one line: the
field, the value, and what is allowed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, ValidationError

from zsim.bounded_text import bounded_toml
from zsim.config_error import line
from zsim.strategy.config_table import Count, Flag, Positive, Table, Time


class StudyError(ValueError):
    """A study that cannot be used, in one line: field, value, what is allowed."""


class AxisTable(Table):
    """`[[axis]]`: what changes from run to run, in one of three forms.

    `field` with `values`; `zip`, lists of equal length by field, which go together; or `variants`,
    tables of a scenario by name. `labels` are names of the values.
    """

    name: str | None = None
    field: str | None = None
    values: tuple[Any, ...] | None = None
    zip: dict[str, tuple[Any, ...]] | None = None
    variants: dict[str, dict[str, Any]] | None = None
    labels: tuple[str, ...] | None = None


class WhereTable(Table):
    """`[where]`: a combination stays if every condition in `keep` holds, and none in `drop`."""

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class GoalTable(Table):
    """`[goal]`: what is least in the best run, among those that meet every limit.

    `minimize` is "step_time", "cost_per_token", "gpus", or a field of the scenario with numbers.
    With `for_each`, an axis, there is a best run for each choice on it. `max_slowdown` is over the
    step time of the fastest run that fits, of those with the same choice.
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
    """A study file, read. `base` and variants hold tables of a scenario, not yet looked at."""

    question: Annotated[str, Strict()]
    hold: Literal["global_batch", "nothing"] = "global_batch"
    base: dict[str, Any]
    axis: Annotated[tuple[AxisTable, ...], Field(min_length=1)]
    where: WhereTable = WhereTable()
    goal: GoalTable = GoalTable()


def parse(text: str) -> StudyFile:
    """Return the study in TOML `text`.

    Raises:
        StudyError: it cannot be used.
    """
    try:
        data = bounded_toml(text)
    except ValueError as error:
        raise StudyError(f"not TOML: {error}") from None
    return from_tables(data)


def from_tables(data: Mapping[str, Any]) -> StudyFile:
    """Return the study in `data`, as TOML is read.

    Raises:
        StudyError: it cannot be used.
    """
    try:
        return StudyFile.model_validate(data)
    except ValidationError as error:
        raise StudyError(line(error.errors(include_url=False), StudyFile)) from None
