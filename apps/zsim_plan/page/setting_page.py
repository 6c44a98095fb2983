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
    """

    name: str
    label: str
    default: str
    groups: OptionGroups
    typed: bool = False
    note: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """Values of all options."""
        return tuple(value for _, options in self.groups for value, _ in options)


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
        links: addresses and their labels.
        remedies: address of the page of changes that make the run fit; "" if none are needed.
    """

    headline: str
    fits: bool = False
    error: str = ""
    cards: tuple[tuple[str, str, str], ...] = ()
    bars: tuple[MemoryBar, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    links: tuple[Option, ...] = ()
    remedies: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingPage:
    """The page: its fields, their values, and the answer to them."""

    fields: tuple[FormField, ...]
    answer: FormAnswer
    values: Mapping[str, str] = field(default_factory=dict[str, str])
