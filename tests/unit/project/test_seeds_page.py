"""docs/seeds.md has every claim that ships; cheap ones are predicted again."""

import pytest
from generated_sections import sections
from seeds_page import COMMAND, PAGE, claim_cells

from zsim.files.shipped_files import published_papers
from zsim_lab.answer.paper_validation import verdicts_of
from zsim_lab.verdict.claims import claim_verdicts
from zsim_lab.verdict.paper_figures import FigureQuantity, Paper, parse

SEEDS = [paper for paper in map(parse, published_papers().values()) if paper.seed]
CHEAP = (FigureQuantity.PLANNED, FigureQuantity.FORMULA)


def rows(name: str) -> list[list[str]]:
    """Return the cells of the rows of a section."""
    found = dict(sections(PAGE.read_text("utf-8")))[name.replace("-", " ")]
    return [line.strip("| ").split(" | ") for line in found.splitlines()[2:] if line]


@pytest.mark.parametrize("seed", sorted({paper.seed for paper in SEEDS}))
def test_the_page_has_every_claim_with_its_published_number(seed: str) -> None:
    claims = [claim for paper in SEEDS if paper.seed == seed for claim in paper.claims]
    shown = [(cells[0], cells[1]) for cells in rows(f"claims of {seed}")]
    assert shown == [(claim.sentence, claim.source) for claim in claims], COMMAND


def cheap(paper: Paper) -> Paper:
    """Return the paper with the figures that need no simulation."""
    figures = tuple(figure for figure in paper.figures if figure.quantity in CHEAP)
    return Paper(publication=paper.publication, figures=figures, claims=paper.claims)


@pytest.mark.parametrize("seed", ["ZeRO", "ZeRO-Infinity"])
def test_claims_on_memory_and_traffic_are_predicted_as_the_page_says(seed: str) -> None:
    papers = [cheap(paper) for paper in SEEDS if paper.seed == seed]
    figures = [verdict for paper in papers if paper.figures for verdict in verdicts_of(paper)]
    claims = [claim for paper in papers for claim in paper.claims]
    shown = {cells[0]: cells for cells in rows(f"claims of {seed}")}
    predicted = [each for each in claim_verdicts(claims, figures) if each.values]
    assert len(predicted) >= 2
    for each in predicted:
        cells = claim_cells(each, {})
        assert shown[each.claim.sentence][:6] == [*cells[:6]], COMMAND
