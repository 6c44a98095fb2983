"""The page on which a setting is chosen: fields of a form, and the answer to what was chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Option = tuple[str, str]
"""A value, and what it is called."""

OptionGroups = tuple[tuple[str, tuple[Option, ...]], ...]
"""Options under headings; the heading "" is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """A field of the form.

    Attributes:
        name: as an address has it.
        label: as a reader sees it.
        default: the value before anything is chosen.
        groups: what can be chosen.
        typed: whether other values may be typed.
        note: what is said below it.
    """

    name: str
    label: str
    default: str
    groups: OptionGroups
    typed: bool = False
    note: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """Everything that can be chosen."""
        return tuple(value for _, options in self.groups for value, _ in options)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """Memory of a tier as a bar: what is said beside it, and the share that is taken."""

    text: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormAnswer:
    """What a setting comes to, or in one line why there is no answer.

    Attributes:
        headline: the answer in a sentence.
        fits: whether it is a good one.
        error: the error of the step time, in one line.
        cards: name, figure and what stands below it.
        bars: memory by tier.
        facts: lines of `zsim run`, by name.
        links: addresses and their names.
        remedies: address of what would make it fit; "" where nothing has to.
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
