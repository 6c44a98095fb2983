"""Answers as text: a title, facts in two columns, tables of words and numbers."""

import re
from collections.abc import Collection, Iterable, Sequence
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

    A rule below the column names needs wider gaps. The first column is wrapped to keep lines
    within `width` if possible.
    """
    lines = [tuple(columns), *map(tuple, rows)]
    gap = "   " if ruled else "  "
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    taken = sum(widths[1:]) + len(gap) * (len(widths) - 1)
    if width is not None:
        widths[0] = min(widths[0], max(width - taken, 1))
    text = [_row(line, widths, gap, words) for line in lines]
    if ruled:
        text.insert(1, RULE * (widths[0] + taken))
    return "\n".join(text)


def _row(cells: Sequence[str], widths: Sequence[int], gap: str, words: Collection[int]) -> str:
    """Return a row of a table; the first cell wraps onto more lines below."""
    first, *more = wrap(cells[0], widths[0]) or [""]
    aligned = [
        f"{cell:{'<' if at in words else '>'}{width}}"
        for at, (cell, width) in enumerate(zip([first, *cells[1:]], widths, strict=True))
    ]
    return "\n".join([gap.join(aligned).rstrip(), *more])
