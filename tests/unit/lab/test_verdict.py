"""Verdicts: every row counts once, and rows that fitted constants are apart from the others."""

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim_lab.answer.validation import Validation
from zsim_lab.verdict.verdict import WORST, Fact, Verdict, VerdictRow, errors_of

ROWS = st.lists(
    st.builds(
        VerdictRow,
        place=st.integers(2, 99),
        name=st.just("a row"),
        published=st.floats(0.1, 10),
        predicted=st.floats(0.1, 10),
        is_kept=st.booleans(),
        groups=st.fixed_dictionaries({"hardware": st.sampled_from(["a100", "h100", ""])}),
    ),
    max_size=20,
)


def verdict(rows: list[VerdictRow], **more: Any) -> Verdict:  # noqa: ANN401  (any field)
    return Verdict(
        name="a table", quantity="step time", rows=tuple(rows), shown="{:.3g} s".format, **more
    )


@given(ROWS)
def test_every_row_counts_once(rows: list[VerdictRow]) -> None:
    found = verdict(rows, unmodelled=((7, "no tensor ranks"),), without=3)
    counts = [0 if each is None else each.rows for each in (found.all, found.kept, found.fitted)]
    assert counts == [len(rows), len(found.kept_rows), len(rows) - len(found.kept_rows)]
    assert (found.modelled, found.total) == (len(rows) + 3, len(rows) + 4)
    of_hardware = found.groups().get("hardware", {})
    named = [row for row in found.kept_rows if row.groups["hardware"]]
    assert sum(each.rows for each in of_hardware.values()) == len(named)
    assert set(of_hardware) == {row.groups["hardware"] for row in named}


@given(ROWS)
def test_the_worst_rows_are_those_furthest_off(rows: list[VerdictRow]) -> None:
    worst = verdict(rows).worst
    assert len(worst) == min(WORST, len(rows))
    furthest = sorted((abs(row.off) for row in rows), reverse=True)
    assert [abs(row.off) for row in worst] == furthest[:WORST]


@given(st.lists(st.floats(0, 5), min_size=1, max_size=30))
def test_summaries_of_errors_are_in_order(errors: list[float]) -> None:
    found = errors_of(errors)
    assert found.rows == len(errors)
    assert min(errors) <= found.median <= found.p90 + 1e-12 <= found.most + 2e-12
    assert found.most == max(errors)


@given(ROWS)
def test_text_and_json_have_the_same_errors(rows: list[VerdictRow]) -> None:
    fact = Fact(name="said", value=1, lines=("said once",))
    found = Validation(
        verdicts={"": [verdict(rows, unmodelled=((7, "why"), (9, "why")), facts=(fact,))]},
        more={"not_read": []},
    )
    text = found.text()
    told = cast("dict[str, Any]", json.loads(json.dumps(found.to_dict())))["files"]["a table"]
    assert "  not lines 7, 9: why" in text.splitlines()
    assert text.count("said once") == told["said"] == 1
    if rows:
        assert f"{told['median_abs_error']:.1%}" in text
        assert told["judged"]["modelled"] + told["fitted"]["modelled"] == len(rows)
    else:
        assert told["median_abs_error"] is None


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_row_that_may_be_fitted_is_marked_in_text(*, is_kept: bool) -> None:
    row = VerdictRow(
        place=2, name="line 2", published=2.0, predicted=1.0, is_kept=is_kept, alternative=1
    )
    text = Validation(verdicts={"runs:": [verdict([row])]}, more={}).text()
    assert text.startswith("runs:\n")
    line = "line 2: published 2 s, predicted 1 s, -50.0%, with what needs less memory"
    assert line + ("" if is_kept else ", may be fitted") == text.splitlines()[-1].strip()
