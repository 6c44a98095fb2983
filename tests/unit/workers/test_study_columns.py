"""Rows of a study as CSV that a spreadsheet may open."""

import csv
from io import StringIO

import pytest

from zsim_study.answer.sweep_result import sweep
from zsim_study.workers.study_columns import csv_text

FORMULAS = ("=cmd|'/c calc'!A1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "-1.5e3", "ordinary")


@pytest.mark.one_commit_in(9)
def test_no_cell_is_a_formula() -> None:
    study = {
        "question": "Which?",
        "base": {"scenario": "tiny"},
        "axis": [
            {"field": "zero.bucket_elements", "name": "=axis", "values": [*range(1000, 1007)],
             "labels": [*FORMULAS]}
        ],
        "goal": {"minimize": "step_time"},
    }  # fmt: skip
    names, *rows = csv.reader(StringIO(csv_text(sweep(study).study)))
    assert names[0] == "'=axis"
    assert [row[0] for row in rows] == [
        f"'{each}" if each not in {"-1.5e3", "ordinary"} else each for each in FORMULAS
    ]
    assert all(not cell.startswith(("=", "+", "@", "\t", "\r")) for row in rows for cell in row)
