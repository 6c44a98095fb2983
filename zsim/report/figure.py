"""Figures as values: what is shown, before somebody says how wide it is drawn."""

from dataclasses import dataclass
from enum import Enum

from zsim.report.lane import Bar, Sort


class NoFigureError(ValueError):
    """A figure is asked for that the result does not have."""


class SeriesMark(Enum):
    """How a series looks beside its name."""

    BOX = "box"
    LINE = "line"
    DOTTED = "dotted"


@dataclass(frozen=True, slots=True)
class Series:
    """What belongs together in a figure: its name, its colour, and how its name is marked."""

    name: str
    colour: str
    mark: SeriesMark = SeriesMark.BOX


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBar:
    """A bar of a row, from `start` to `end` on the axis.

    Attributes:
        series: which of the figure it belongs to.
        title: what it says when a pointer is on it.
        text: what is written into it, or beside it.
        pale: true if it is of a run that does not meet the goal.
    """

    start: float
    end: float
    series: int
    title: str
    text: str = ""
    pale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRows:
    """Rows of bars, one below the other: parts of a whole, or changes to both sides of zero.

    Attributes:
        rows: a name and bars.
        axis: what bars are measured in.
        is_beside: true if texts stand beside bars rather than in them.
    """

    series: tuple[Series, ...]
    rows: tuple[tuple[str, tuple[RowBar, ...]], ...]
    axis: str
    is_beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedCurves:
    """Layers on top of each other over places in a row, and lines that are no part of the stack.

    Attributes:
        series: of layers, then of lines.
        layers: values at each place.
        lines: values at each place; None where nothing is known.
        titles: what each place says when a pointer is on it.
        ticks: places with a name.
        axis: what the places are.
        unit: of values.
    """

    series: tuple[Series, ...]
    layers: tuple[tuple[float, ...], ...]
    lines: tuple[tuple[float | None, ...], ...]
    titles: tuple[str, ...]
    ticks: tuple[tuple[int, str], ...]
    axis: str
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePoint:
    """A run over one of the choices on the axis.

    Attributes:
        choice: its number.
        band: error of the value, to both sides; 0 where nobody knows it.
        meets: false if the run does not meet the goal.
        title: what it says when a pointer is on it.
    """

    choice: int
    value: float
    band: float
    meets: bool
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceChart:
    """Values over choices: bars or dots where these are names, lines where they are amounts.

    Attributes:
        series: the lines; each has its points.
        values: what the values are.
        is_bars: true if each point is a bar.
        is_joined: true if something lies between two choices.
        is_seconds: true if values are times.
    """

    series: tuple[Series, ...]
    points: tuple[tuple[ChoicePoint, ...], ...]
    choices: tuple[str, ...]
    axis: str
    values: str
    is_bars: bool
    is_joined: bool
    is_logarithmic: bool
    is_seconds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedPoint:
    """A point at `x`, `y`, of a series; `title` is what it says when a pointer is on it."""

    x: float
    y: float
    series: int
    title: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChart:
    """Points between two axes of amounts; those of the first series are a front and are joined."""

    series: tuple[Series, ...]
    points: tuple[PlottedPoint, ...]
    x_axis: str
    y_axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBars:
    """A lane for every stream, a bar for every operation, from one time to another."""

    lanes: dict[str, list[Bar]]
    begin_ps: int
    end_ps: int

    @property
    def series(self) -> tuple[Series, ...]:
        """Sorts of operations that there are, in their order."""
        found = {bar.sort for bars in self.lanes.values() for bar in bars}
        return tuple(Series(*sort.value) for sort in Sort if sort in found)


Figure = BarRows | StackedCurves | ChoiceChart | PointChart | LaneBars
