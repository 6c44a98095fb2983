"""Answers as text: a title, facts in two columns, tables of words and numbers."""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from textwrap import fill, wrap

LINE_WIDTH = 100
NUMBER_AND_UNIT = re.compile(r"(?<=[0-9]) (?=(?:[kMGTPEmunp]?(?:B|s)|[kMGTPE]?FLOP/s|tokens/s)\b)")
NO_BREAK = "\N{NO-BREAK SPACE}"
RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"


def title_text(title: str) -> str:
    """Return the title of an answer, wrapped if it is too long for one line."""
    return title if len(title) <= LINE_WIDTH else fill(title, LINE_WIDTH, subsequent_indent="  ")


def facts_text(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and texts in two columns; no line breaks between a number and its unit."""
    known = list(facts)
    width = max((len(name) for name, _ in known), default=0)
    indent = " " * (width + 2)
    return "\n".join(
        fill(
            NUMBER_AND_UNIT.sub(NO_BREAK, text),
            LINE_WIDTH,
            initial_indent=f"{name:<{width}}  ",
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ).replace(NO_BREAK, " ")
        for name, text in known
    )


def table_text(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    ruled: bool = False,
    width: int | None = LINE_WIDTH,
) -> str:
    """Return a table; columns at `words` are left-aligned, the others right-aligned.

    A rule below the column names needs wider gaps. Columns at `words` are wrapped to keep lines
    within `width` if possible; a column narrower than its share leaves the rest to the others.
    """
    lines = [tuple(columns), *map(tuple, rows)]
    gap = "   " if ruled else "  "
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is not None:
        _share(widths, words, width - len(gap) * (len(widths) - 1))
    text = [_row(line, widths, gap, words) for line in lines]
    if ruled:
        text.insert(1, RULE * (sum(widths) + len(gap) * (len(widths) - 1)))
    return "\n".join(text)


def _share(widths: list[int], words: Collection[int], width: int) -> None:
    """Narrow the columns at `words` until all columns fit into `width`, the widest first."""
    left = width - sum(each for at, each in enumerate(widths) if at not in words)
    narrow_first = sorted(words, key=lambda at: widths[at])
    for done, at in enumerate(narrow_first):
        widths[at] = min(widths[at], max(left // (len(narrow_first) - done), 1))
        left -= widths[at]


def _row(cells: Sequence[str], widths: Sequence[int], gap: str, words: Collection[int]) -> str:
    """Return a row of a table; cells of words wrap onto more lines below."""
    wrapped = [
        wrap(cell, width) if at in words and len(cell) > width else [cell]
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "\n".join(
        gap.join(
            f"{cell:{'<' if at in words else '>'}{width}}"
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in zip_longest(*wrapped, fillvalue="")
    )
