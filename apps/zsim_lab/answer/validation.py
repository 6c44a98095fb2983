"""Verdicts as an answer: one table of errors, the worst rows, and rows without a prediction."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from zsim.api.answer import Answer
from zsim.api.answer_text import table_text
from zsim.api.notebook import Picture
from zsim.files.output_file import unwritten
from zsim.files.picture import need_format, write_picture
from zsim_lab.verdict.paper_picture import picture
from zsim_lab.verdict.scatter import scatter
from zsim_lab.verdict.verdict import Errors, Verdict, VerdictRow

COLUMNS = ("", "rows of", "rows", "median", "mean", "90 %", "worst")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(Answer):
    """Predictions of published values.

    Attributes:
        verdicts: of each table or figure, under a heading; the heading may be empty.
        notes: lines below all tables.
        more: further results in JSON.
        is_paper: figures have one square each in a picture, and all their rows in JSON.
    """

    verdicts: Mapping[str, Sequence[Verdict]]
    notes: tuple[str, ...] = ()
    more: Mapping[str, object]
    is_paper: bool = False

    def text(self) -> str:
        """Return a table of errors for each heading, the worst rows and unpredicted rows."""
        lines: list[str] = []
        for heading, found in self.verdicts.items():
            lines += [*([heading] if heading else []), _text(found)]
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, object]:
        """Return what `zsim validate --json` prints."""
        files: defaultdict[str, dict[str, object]] = defaultdict(dict)
        several = len({each.quantity for each in self.every}) > 1
        for found in self.every:
            told = _object(found, rows=self.is_paper)
            files[found.name] |= {found.quantity: told} if several else told
        return {"files": files, **self.more}

    def picture(self, path: str | PathLike[str] | None = None) -> Picture:
        """Draw predicted against published values, and write that to `path`: .svg, .png or .pdf.

        Raises:
            MistakeError: PNG and PDF need the extra `draw`.
            UnwrittenError: it cannot be written, or there is nothing to draw.
        """
        drawn = [found for found in self.every if found.rows]
        if path is not None:
            need_format("picture", Path(path))
            if not drawn:
                raise unwritten(Path(path), "no row is modelled")
        made = picture(drawn) if self.is_paper else scatter(drawn)
        if path is not None:
            write_picture("picture", Path(path), made)
        return Picture(made)

    @property
    def every(self) -> list[Verdict]:
        """All verdicts, in their order."""
        return [each for found in self.verdicts.values() for each in found]


def errors_object(errors: Errors | None, *, count: bool = False) -> dict[str, object]:
    """Return a summary of errors for `--json`; null where no row is modelled."""
    return {
        **({"modelled": errors.rows if errors else 0} if count else {}),
        "median_abs_error": errors.median if errors else None,
        "mean_abs_error": errors.mean if errors else None,
        "p90_abs_error": errors.p90 if errors else None,
    }


def _object(found: Verdict, *, rows: bool) -> dict[str, object]:
    return {
        "quantity": found.quantity,
        "rows": found.total,
        "modelled": found.modelled,
        **errors_object(found.all),
        "judged": errors_object(found.kept, count=True),
        "fitted": errors_object(found.fitted, count=True),
        **{
            kind: {name: errors_object(errors, count=True) for name, errors in names.items()}
            for kind, names in found.groups().items()
        },
        **{fact.name: fact.value for fact in found.facts},
        **({"predictions": [_row_object(row) for row in found.rows]} if rows else {}),
        "worst": [_row_object(row) for row in found.worst],
        "unmodelled": [{"row": place, "reason": why} for place, why in found.unmodelled],
    }


def _row_object(row: VerdictRow) -> dict[str, Any]:
    return {
        "row": row.place,
        "judged": row.is_kept,
        "way": row.alternative,
        "published": row.published,
        "predicted": row.predicted,
        "error": row.off,
    }


def _text(verdicts: Sequence[Verdict]) -> str:
    rows: list[tuple[str, ...]] = []
    for found in verdicts:
        if found.all is not None:
            rows.append((found.name, "all", *errors_cells(found.all)))
        if found.kept is not None and found.fitted is not None:
            rows.append(("", "may be fitted", *errors_cells(found.fitted)))
            rows.append(("", "kept", *errors_cells(found.kept)))
        for names in found.groups().values():
            rows += [("", name, *errors_cells(errors)) for name, errors in names.items()]
    lines = [table_text(COLUMNS, rows, words=range(2), width=None)] if rows else []
    for found in verdicts:
        lines.append(f"{found.name}: {found.modelled} of {found.total} rows are modelled")
        lines += _unmodelled_lines(found.unmodelled)
        lines += [f"  {line}" for fact in found.facts for line in fact.lines]
        lines += ["  furthest off:"] * bool(found.worst)
        lines += [f"    {_line(found, row)}" for row in found.worst]
    return "\n".join(lines)


def errors_cells(errors: Errors) -> tuple[str, ...]:
    """Return the number of rows and their errors as cells of a table."""
    values = (errors.median, errors.mean, errors.p90, errors.most)
    return (f"{errors.rows}", *(f"{value:.1%}" for value in values))


def _unmodelled_lines(found: Iterable[tuple[int | str, str]]) -> list[str]:
    """Return why rows are not predicted, each reason once with all places."""
    by_reason: dict[str, list[str]] = {}
    for place, reason in found:
        word = "line " if isinstance(place, int) else ""
        by_reason.setdefault(reason, []).append(f"{word}{place}")
    return [
        f"  not {', '.join(places).replace(', line ', ', ')}: {reason}".replace(
            "not line ", "not lines " if len(places) > 1 else "not line ", 1
        )
        for reason, places in by_reason.items()
    ]


def _line(found: Verdict, row: VerdictRow) -> str:
    notes = ", with what needs less memory" if row.alternative else ""
    notes += "" if row.is_kept else ", may be fitted"
    given, said = found.shown(row.published), found.shown(row.predicted)
    return f"{row.name}: published {given}, predicted {said}, {row.off:+.1%}{notes}"
