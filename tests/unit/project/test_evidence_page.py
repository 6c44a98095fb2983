"""docs/evidence.md has the errors of the table of published runs that ships.

Tests of `zsim validate error` and `best` compare the sections with their output.
"""

from dataclasses import replace

import evidence_page
import pytest
from evidence_page import COMMAND, PAGE, SLOW, by_publication, errors, makers
from generated_sections import sections

from zsim.prediction.evidence import judged_runs

SECTIONS = dict(sections(PAGE.read_text("utf-8")))


def test_every_section_is_made_from_the_table_that_ships() -> None:
    assert list(SECTIONS) == list(makers())


@pytest.mark.parametrize("name", sorted(makers().keys() - SLOW))
def test_a_section_has_the_errors_of_the_table_that_ships(name: str) -> None:
    assert SECTIONS[name] == makers()[name](), f"run: {COMMAND}"


@pytest.mark.parametrize("name", ["step time", "runtimes", "tensor ranks", "nodes"])
def test_no_row_is_left_out_of_a_table(name: str) -> None:
    lines = [line.split(" | ") for line in SECTIONS[name].splitlines()[2:]]
    column = SECTIONS[name].splitlines()[0].split(" | ").index("rows")
    counts = [int(cells[column].replace(",", "")) for cells in lines if cells[0] != "| all"]
    assert sum(counts) == len(judged_runs())


def test_errors_are_relative_and_signed_ones_keep_their_sign() -> None:
    # The sizes are 0.1, 0.2 and 0.4: their median is 0.2, their 90th percentile 0.2 + 0.8 * 0.2.
    assert errors([-0.4, -0.2, 0.1]) == ("3", "20.0 %", "36.0 %", "40.0 %", "-20.0 %")


def test_fitted_rows_have_a_line_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = judged_runs()[0]
    far = replace(run, predicted_step_s=2 * run.step_s)
    runs = (replace(far, fitted=True), replace(far, predicted_step_s=run.step_s))
    monkeypatch.setattr(evidence_page, "judged_runs", lambda: runs)
    lines = by_publication(lambda run: run.step_error).splitlines()[2:]
    assert lines[0] == f"| {run.publication} | 1 | 0.0 % | 0.0 % | 0.0 % | +0.0 % |"
    assert lines[1] == (
        f"| {run.publication}, fitted | 1 | 100.0 % | 100.0 % | 100.0 % | +100.0 % |"
    )
    assert lines[2].startswith("| all | 2 | 50.0 %")
