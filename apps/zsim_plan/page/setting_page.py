"""The page for choosing a setting: the fields of a form, and the answer for their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Option = tuple[str, str]
"""A value and its label."""

OptionGroups = tuple[tuple[str, tuple[Option, ...]], ...]
"""Options grouped by headings; the heading "" is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """A field of the form.

    Attributes:
        name: name of the query parameter.
        label: text that the reader sees.
        default: value before the reader chooses one.
        groups: the options, under headings.
        typed: True if the reader may type other values.
        note: text below the field.
        hint: example that an empty field shows.
        lines: number of lines of a field for a file; 0 for a value in one line.
    """

    name: str
    label: str
    default: str
    groups: OptionGroups
    typed: bool = False
    note: str = ""
    hint: str = ""
    lines: int = 0

    @property
    def values(self) -> tuple[str, ...]:
        """Values of all options."""
        return tuple(value for _, options in self.groups for value, _ in options)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSection:
    """Fields under a heading; `folded` hides them until the reader opens the section."""

    title: str
    fields: tuple[FormField, ...]
    folded: bool = False

    def is_used(self, values: Mapping[str, str]) -> bool:
        """Return True if a field has another value than its default."""
        return any(values[each.name] != each.default for each in self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """Memory of a tier as a bar: its label, and the share in use."""

    text: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormAnswer:
    """Result of a setting, or a one-line reason why there is none.

    Attributes:
        headline: the answer in a sentence.
        fits: True if the setting fits in memory.
        error: the error of the step time, in one line.
        cards: name, figure and caption of each card.
        bars: memory by tier.
        facts: lines of `zsim run`, by name.
        columns, rows: names and rows of a table, all as text.
        chart: a chart as SVG, on a wide and on a narrow page.
        file: name and text of a file that is shown.
        links: addresses and their labels.
        remedies: address of the page of changes that make the run fit; "" if none are needed.
    """

    headline: str
    fits: bool = False
    error: str = ""
    cards: tuple[tuple[str, str, str], ...] = ()
    bars: tuple[MemoryBar, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    chart: tuple[str, str] = ("", "")
    file: tuple[str, str] = ("", "")
    links: tuple[Option, ...] = ()
    remedies: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Two answers and the ratio of their speeds.

    Attributes:
        answers: name, differing choices and answer of each side.
        verdict: the ratio of the tokens per second, and its error.
    """

    answers: tuple[tuple[str, str, FormAnswer], ...]
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingPage:
    """The page: its fields, their values, and the answer to them.

    `kept` has the values of the setting that is compared, by field; empty if there is none.
    """

    sections: tuple[FormSection, ...]
    answer: FormAnswer | SideBySide
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: Mapping[str, str] = field(default_factory=dict[str, str])
