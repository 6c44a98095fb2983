"""Claims of the papers that zsim carries out: published, predicted, executed, with a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zsim.api.answer import Answer, Progress, ignore_progress
from zsim.api.answer_text import table_text
from zsim.files.shipped_files import published_papers
from zsim_lab.answer.executed_claims import Executed, execute
from zsim_lab.answer.paper_validation import verdicts_of
from zsim_lab.verdict.claims import NEAR, ClaimVerdict, claim_verdicts
from zsim_lab.verdict.paper_figures import Paper, PaperFigure, parse
from zsim_lab.verdict.verdict import Verdict, VerdictRow

CLAIMS = ("claim", "published", "predicted", "off", "verdict", "executed")
FIGURES = ("figure", "row", "published", "predicted", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedPaper:
    """Claims and figures of the files of one paper.

    Attributes:
        claims: sentences and trends with their predictions.
        figures: figures that count, with the rows that have a published value.
    """

    name: str
    publications: tuple[str, ...]
    claims: tuple[ClaimVerdict, ...]
    figures: tuple[Verdict, ...]

    @property
    def rows(self) -> tuple[VerdictRow, ...]:
        """Rows with a published value that no constant was fitted to."""
        return tuple(row for figure in self.figures for row in figure.kept_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedValidation(Answer):
    """Every claim of the papers that zsim carries out.

    Attributes:
        papers: the papers in the order of their publication.
        executed: small runs on real ranks by mechanism; empty without real ranks.
    """

    papers: tuple[SeedPaper, ...]
    executed: Mapping[str, Executed]

    @property
    def claims(self) -> tuple[ClaimVerdict, ...]:
        """Claims of all papers."""
        return tuple(claim for paper in self.papers for claim in paper.claims)

    @property
    def rows(self) -> tuple[VerdictRow, ...]:
        """Rows of all figures."""
        return tuple(row for paper in self.papers for row in paper.rows)

    def text(self) -> str:
        """Return a table of claims and one of figures for each paper, and the counts."""
        lines: list[str] = []
        for paper in self.papers:
            lines += [*paper.publications, ""]
            rows = [self._claim_cells(each) for each in paper.claims]
            lines += [table_text(CLAIMS, rows, words=(0, 4, 5), ruled=True), *_reasons(paper), ""]
            lines += [table_text(FIGURES, _figure_cells(paper), words=(0, 1), ruled=True), ""]
        return "\n".join([*lines, *self.counts()])

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim validate seeds --json` prints."""
        return {
            "papers": [self._paper_object(each) for each in self.papers],
            "executed": {
                name: {"steps": each.steps, "apart": each.apart, "reason": each.why_not or None}
                for name, each in self.executed.items()
            },
            "rows": len(self.rows),
            "rows_within_15_percent": sum(abs(row.off) <= NEAR for row in self.rows),
            "claims": len(self.claims),
            "claims_that_hold": sum(each.holds is True for each in self.claims),
            "claims_without_a_prediction": sum(each.holds is None for each in self.claims),
        }

    def _claim_cells(self, found: ClaimVerdict) -> tuple[str, ...]:
        claim = found.claim
        name = claim.executed
        run = self.executed[name].word if name in self.executed else ""
        return (
            f"{claim.sentence} ({claim.source})",
            found.published_text,
            found.predicted_text,
            found.off_text,
            found.verdict_text,
            f"{name}: {run}" if run else "",
        )

    def counts(self) -> list[str]:
        """Return lines with the numbers of figures, claims and trends that hold."""
        near = sum(abs(row.off) <= NEAR for row in self.rows)
        held = [each.holds for each in self.claims]
        trends = [each.holds for each in self.claims if each.claim.is_trend]
        lines = [
            f"{near} of {len(self.rows)} published figures are within {NEAR:.0%}",
            f"{held.count(True)} of {len(held)} claims hold, {held.count(None)} have no prediction",
            f"{trends.count(True)} of {len(trends)} trends have the published order",
        ]
        if self.executed:
            asked = [each for each in self.executed.values() if not each.is_reference]
            apart = [each.apart for each in asked if each.apart is not None]
            lines.append(
                f"{len(apart)} of {len(asked)} mechanisms ran on 4 ranks; the losses of "
                f"{apart.count(0)} have the bits of their reference in fp32"
            )
        return lines

    def _paper_object(self, paper: SeedPaper) -> dict[str, object]:
        return {
            "name": paper.name,
            "publications": list(paper.publications),
            "claims": [_claim_object(each) for each in paper.claims],
            "figures": [
                {
                    "figure": figure.name,
                    "row": row.name,
                    "published": row.published,
                    "predicted": row.predicted,
                    "error": row.off,
                }
                for figure in paper.figures
                for row in figure.kept_rows
            ],
            "unmodelled": [
                {"figure": figure.name, "row": place, "reason": why}
                for figure in paper.figures
                for place, why in figure.unmodelled
            ],
        }


def validate_seeds(*, real: bool = True, progress: Progress = ignore_progress) -> SeedValidation:
    """Predict every claim and figure of the ZeRO papers.

    Args:
        real: also run the mechanisms of claims on 4 local ranks; needs torch.
        progress: called with the number of predicted figures and their total.
    """
    files = [paper for paper in map(parse, published_papers().values()) if paper.seed]
    names = dict.fromkeys(paper.seed for paper in files)
    asked = sum(len(paper.figures) for paper in files)
    done = 0
    papers: list[SeedPaper] = []
    for name in names:
        own = [paper for paper in files if paper.seed == name]
        found: list[Verdict] = []
        for paper in own:
            found += verdicts_of(paper)
            done += len(paper.figures)
            progress(done, asked)
        papers.append(_paper(name, own, found))
    mechanisms = frozenset(
        each.claim.executed for paper in papers for each in paper.claims if each.claim.executed
    )
    return SeedValidation(papers=tuple(papers), executed=execute(mechanisms) if real else {})


def _paper(name: str, files: Sequence[Paper], found: Sequence[Verdict]) -> SeedPaper:
    figures = [figure for file in files for figure in file.figures]
    counts = [
        verdict for figure, verdict in zip(figures, found, strict=True) if _counts_as_claim(figure)
    ]
    claims = [claim for file in files for claim in file.claims]
    return SeedPaper(
        name=name,
        publications=tuple(file.publication for file in files),
        claims=tuple(claim_verdicts(claims, found)),
        figures=tuple(counts),
    )


def _counts_as_claim(figure: PaperFigure) -> bool:
    """Return False for rows that another figure predicts with the runtime that was measured."""
    return not figure.again and not figure.instead


def _reasons(paper: SeedPaper) -> list[str]:
    """Return a line for each claim that is not predicted or has a known cause."""
    return [f"  {each.claim.sentence}: {each.reason}" for each in paper.claims if each.reason]


def _figure_cells(paper: SeedPaper) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [
        (
            figure.name if at == 0 else "",
            row.name,
            figure.shown(row.published),
            figure.shown(row.predicted),
            f"{row.off:+.0%}",
        )
        for figure in paper.figures
        for at, row in enumerate(figure.kept_rows)
    ]
    for figure in paper.figures:
        for place, why in figure.unmodelled:
            found.append((figure.name, f"{place}: not predicted: {why}", "", "", ""))
    return found


def _claim_object(found: ClaimVerdict) -> dict[str, object]:
    claim = found.claim
    return {
        "claim": claim.sentence,
        "source": claim.source,
        "relation": claim.relation.value,
        "published": claim.published,
        "unit": claim.unit or None,
        "predicted": list(found.values),
        "error": found.off,
        "holds": found.holds,
        "reason": found.reason or None,
        "executed": claim.executed or None,
    }
