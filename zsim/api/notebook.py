"""Results in notebooks: pictures, facts and tables that show themselves."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

ROWS_MAX = 50
"""Rows of a table that a notebook shows; `to_pandas` has all."""


class Picture(str):
    """SVG of a picture; in a notebook it shows itself."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def facts_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a title above names and what they are."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in facts
    )
    return f"<div><b>{escape(title)}</b><table>{rows}</table></div>"


def table_html(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return a title above a table whose columns are the keys of the first of `rows`."""
    names = list(rows[0]) if rows else []
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(row[name]))}</td>' for name in names)}</tr>"
        for row in rows[:ROWS_MAX]
    )
    left = len(rows) - ROWS_MAX
    more = f"<p>and {left:,} more: all with to_pandas()</p>" if left > 0 else ""
    return f"<div><b>{escape(title)}</b><table><tr>{head}</tr>{body}</table>{more}</div>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
