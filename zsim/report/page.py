"""A page as a value: sections of sentences, figures, pictures and tables."""

from dataclasses import dataclass

from zsim.report.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """A cell of a table: what it shows, and what it is sorted by."""

    text: str
    value: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table that can be sorted by each column; `numeric` says which stand to the right."""

    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[TableCell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Runs of which a reader chooses two, to see their difference.

    Attributes:
        figures: names of the numbers that each run has; the first is a step time.
        runs: name, and numbers (None if one is unknown).
        errors: of the ratio of the first numbers of each run and each one before it, as shares;
            None if one is unknown.
    """

    figures: tuple[str, ...]
    runs: tuple[tuple[str, tuple[float | None, ...]], ...]
    errors: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with what stands below it: sentences, code, a figure, a picture (SVG), a table.

    Attributes:
        folded: what the table is called, which is shown when a reader opens it; "" shows it.
    """

    title: str
    sentences: tuple[str, ...] = ()
    figure: Figure | None = None
    picture: str | None = None
    table: PageTable | None = None
    pairs: Pairs | None = None
    code: str = ""
    folded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: its title, the answer in a sentence, facts by name, and sections."""

    title: str
    answer: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def words(text: str, value: str | None = None) -> TableCell:
    """Return a cell of words."""
    return TableCell(text=text, value=text if value is None else value)


def number(text: str, value: float) -> TableCell:
    """Return a cell that shows `text` and is sorted by `value`."""
    return TableCell(text=text, value=value)
