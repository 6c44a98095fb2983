"""A page as a value: sections of sentences, figures, pictures and tables."""

from dataclasses import dataclass

from zsim.report.svg.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """A cell of a table: the text that it shows, and the value that sorts it."""

    text: str
    value: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table that a reader can sort by each column; `numeric` columns are right-aligned."""

    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[TableCell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Runs that a reader can compare in pairs.

    Attributes:
        figures: names of the numbers of each run; the first is a step time.
        runs: name and numbers of each run; None stands for an unknown number.
        errors: for each run, the error of the ratio of its step time to that of each run before
            it, as shares; None if unknown.
    """

    figures: tuple[str, ...]
    runs: tuple[tuple[str, tuple[float | None, ...]], ...]
    errors: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with its content: sentences, code, a figure, a picture (SVG), a table.

    Attributes:
        folded: name of the collapsed table; "" shows the table expanded.
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
    """Return a cell with `text`, sorted by `value`, which defaults to `text`."""
    return TableCell(text=text, value=text if value is None else value)


def number(text: str, value: float) -> TableCell:
    """Return a cell that shows `text` and is sorted by `value`."""
    return TableCell(text=text, value=value)
