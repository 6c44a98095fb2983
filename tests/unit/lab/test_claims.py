"""Claims of papers: sentences with a number are compared with predicted figures."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from zsim.files.shipped_files import published_papers
from zsim_lab.answer.executed_claims import MECHANISMS
from zsim_lab.answer.paper_validation import verdicts_of
from zsim_lab.verdict.claims import Claim, Relation, claim_verdicts
from zsim_lab.verdict.paper_figures import PaperError, parse
from zsim_lab.verdict.verdict import UnjudgedRow, Verdict, VerdictRow

FIGURE = Verdict(
    name="figure",
    quantity="throughput",
    rows=(
        VerdictRow(place="small", name="small", published=10.0, predicted=9.0),
        VerdictRow(place="large", name="large", published=20.0, predicted=30.0),
    ),
    unjudged=(UnjudgedRow(name="other", predicted=60.0),),
    unmodelled=(("refused", "the model does not fit"),),
    shown=str,
)


def claim(predicted: str, **given: object) -> Claim:
    return Claim.model_validate(
        {"sentence": "a claim", "source": "section 1", "published": 1.0, "predicted": predicted}
        | given
    )


def holds(predicted: str, **given: object) -> bool | None:
    (found,) = claim_verdicts([claim(predicted, **given)], [FIGURE])
    return found.holds


def test_expressions_read_rows_with_and_without_a_published_value() -> None:
    claims = [
        claim("row('figure', 'large') / row('figure', 'small')"),
        claim("row('figure', 'other')"),
        claim("mean(rows('figure'))"),
        claim("max(rows('figure')) - min(9, 8)"),
    ]
    found = [each.values for each in claim_verdicts(claims, [FIGURE])]
    assert found == [(30 / 9,), (60,), (33,), (52,)]


@given(published=st.floats(0.1, 1e3), predicted=st.floats(0.1, 1e3))
def test_a_number_holds_within_15_percent_and_a_bound_on_its_side(
    published: float, predicted: float
) -> None:
    def says(relation: str, **given: object) -> bool | None:
        return holds(f"{predicted!r} * 1", published=published, relation=relation, **given)

    assert says("about") == (abs(predicted - published) <= 0.15 * published)
    assert says("at least") == (predicted >= published)
    assert says("at most") == (predicted <= published)
    if (predicted > 1) != (published > 1) and published != 1:
        assert not says("about", unit="times"), "a ratio on the other side of 1 has the wrong sign"


@given(values=st.lists(st.floats(0, 100), min_size=2, max_size=5))
def test_a_trend_holds_if_every_step_goes_its_way(values: list[float]) -> None:
    text = ", ".join(map(repr, values))
    rises = all(low < high for low, high in pairwise(values))
    falls = all(low > high for low, high in pairwise(values))
    assert holds(text, published=None, relation="rises") == rises
    assert holds(text, published=None, relation="falls") == falls


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("row('figure', 'refused')", "figure, refused: the model does not fit"),
        ("row('figure', 'none')", "figure: no row is named none"),
        ("row('none', 'small')", "none: no figure has this name"),
        ("open('figure')", "open"),
        ("row('figure', 'small') / 0", "division by zero"),
    ],
)
def test_a_claim_without_a_prediction_has_the_reason(text: str, reason: str) -> None:
    (found,) = claim_verdicts([claim(text)], [FIGURE])
    assert (found.holds, found.off) == (None, None)
    assert reason in found.why_not


def test_a_claim_needs_a_prediction_or_the_reason_why_there_is_none() -> None:
    with pytest.raises(ValidationError, match="needs one of predicted and not_predicted"):
        claim("")
    with pytest.raises(ValidationError, match="needs one of predicted and not_predicted"):
        claim("1.0", not_predicted="nobody knows")
    with pytest.raises(ValidationError, match="published is for claims that are no trend"):
        claim("1.0", relation="rises")
    with pytest.raises(PaperError, match="of is for quantity = planned"):
        parse(PLANNED.replace('of = "wire_bytes_per_rank.data"', ""))


SEEDS = {name: parse(text) for name, text in published_papers().items() if parse(text).seed}


@pytest.mark.parametrize("name", SEEDS)
def test_shipped_claims_name_rows_and_mechanisms_that_exist(name: str) -> None:
    """Evaluate each claim on figures whose rows all have different values."""
    files = [paper for paper in SEEDS.values() if paper.seed == SEEDS[name].seed]
    figures = [
        Verdict(
            name=figure.name,
            quantity=figure.quantity,
            rows=(),
            unjudged=tuple(
                UnjudgedRow(name=run.label, predicted=1.0 + 7 * first + row)
                for row, run in enumerate(figure.runs)
            ),
            shown=str,
        )
        for first, figure in enumerate(figure for paper in files for figure in paper.figures)
    ]
    for found in claim_verdicts(SEEDS[name].claims, figures):
        assert bool(found.values) != bool(found.claim.not_predicted), found.why_not
        assert len(found.values) != 1 or not found.claim.is_trend
        assert not found.claim.executed or found.claim.executed in MECHANISMS
        assert found.claim.relation in {*Relation}


def test_every_row_without_a_published_value_serves_a_claim() -> None:
    for paper in SEEDS.values():
        told = " ".join(claim.predicted for claim in paper.claims)
        for figure in paper.figures:
            if any(run.published is None for run in figure.runs):
                assert repr(figure.name) in told, figure.name


PLANNED = """
publication = "nobody, nowhere"
[base.model]
parameters = 1e6
[base.cluster]
topology = "dgx2_infiniband"
nodes = 1
[base.train]
micro_batch_size = 1
gradient_accumulation_steps = 1
precision = "fp16"
optimizer = "adam"
[[figure]]
name = "bytes"
quantity = "planned"
of = "wire_bytes_per_rank.data"
source = "made up"
keys = ["zero.stage"]
rows = [{ label = "none", values = [0] }, { label = "all", values = [3] }]
"""


def test_planned_rows_are_the_numbers_of_the_plan() -> None:
    (found,) = verdicts_of(parse(PLANNED))
    none, every = (row.predicted for row in found.unjudged)
    # 2 bytes an element: an all-reduce sends 2 x 15/16 elements, stage 3 three times 15/16.
    assert none == pytest.approx(2 * 2 * 1e6 * 15 / 16, rel=1e-3)
    assert every == pytest.approx(2 * 3 * 1e6 * 15 / 16, rel=1e-3)
    assert (found.modelled, found.total, found.rows) == (2, 2, ())
    (unknown,) = verdicts_of(parse(PLANNED.replace("rank.data", "rank.none")))
    assert {why for _, why in unknown.unmodelled} == {
        "of: 'wire_bytes_per_rank.none' is no number of the plan"
    }
