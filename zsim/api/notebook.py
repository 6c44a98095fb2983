"""Pictures, facts and tables with a rich display in notebooks."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

ROWS_MAX = 50
"""Maximum rows of a table in a notebook; `to_pandas` has all."""


class Picture(str):
    """SVG text of a picture; a notebook displays it as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def facts_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a title and a table of names and texts."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in facts
    )
    return f"<div><b>{escape(title)}</b><table>{rows}</table></div>"


def table_html(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return a title and a table; its columns are the keys of the first of `rows`."""
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
