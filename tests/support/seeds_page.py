"""docs/seeds.md, from the claims that ship: `python tests/support/seeds_page.py`; takes minutes.

Sections between marks are made by `zsim validate seeds`; the lines around them are written by hand.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from generated_sections import made, table

from zsim_lab.answer.executed_claims import Executed
from zsim_lab.answer.seed_validation import SeedPaper, SeedValidation, validate_seeds
from zsim_lab.verdict.claims import NEAR, ClaimVerdict
from zsim_lab.verdict.verdict import VerdictRow, errors_of

PAGE = Path(__file__).parents[2] / "docs" / "seeds.md"
COMMAND = "python tests/support/seeds_page.py"
CLAIMS = ("claim", "source", "published:", "predicted:", "error:", "verdict", "executed")
FIGURES = ("figure", "rows:", "within 15 %:", "median:", "worst row", "published:", "predicted:")


def claim_cells(found: ClaimVerdict, executed: dict[str, Executed]) -> tuple[str, ...]:
    """Return the row of a claim; a trend has no published number and no error."""
    claim, verdict = found.claim, found.verdict_text
    return (
        claim.sentence,
        claim.source,
        found.published_text,
        found.predicted_text,
        found.off_text,
        f"{verdict}: {found.reason}" if found.reason and not found.holds else verdict,
        executed_cell(claim.executed, executed),
    )


def executed_cell(name: str, executed: dict[str, Executed]) -> str:
    """Return the mechanism that ran, and how far its losses are from those of plain training."""
    return f"{name}: {executed[name].word}" if name in executed else ""


def figure_cells(paper: SeedPaper) -> Iterator[tuple[str, ...]]:
    """Yield a row for each figure: its errors, and its worst row."""
    for figure in paper.figures:
        rows: Sequence[VerdictRow] = figure.kept_rows
        if rows:
            worst = max(rows, key=lambda row: abs(row.off))
            errors = errors_of([abs(row.off) for row in rows])
            near = sum(abs(row.off) <= NEAR for row in rows)
            yield (
                figure.name,
                f"{len(rows)}",
                f"{near}",
                f"{errors.median * 100:.1f} %",
                worst.name,
                figure.shown(worst.published),
                figure.shown(worst.predicted),
            )


def sections(found: SeedValidation) -> dict[str, str]:
    """Return the sections of the page by name."""
    executed = dict(found.executed)
    texts = {"counts": "".join(f"- {line}\n" for line in found.counts())}
    for paper in found.papers:
        name = paper.name.replace("-", " ")
        claims = [claim_cells(each, executed) for each in paper.claims]
        texts[f"claims of {name}"] = table(CLAIMS, claims)
        texts[f"figures of {name}"] = table(FIGURES, figure_cells(paper))
    return texts


if __name__ == "__main__":
    texts = sections(validate_seeds())
    makers = {name: partial(texts.__getitem__, name) for name in texts}
    PAGE.write_text(made(PAGE.read_text("utf-8"), makers), "utf-8")
