"""`--report`: the page of a run, as one file of HTML."""

from pathlib import Path

from zsim.report.run import run_page
from zsim.shell.outcome import Outcome, outcome_lines
from zsim.shell.page import render
from zsim.shell.written import write


def write_report(path: Path, outcome: Outcome) -> None:
    """Put the page of `outcome` in the file at `path`.

    Raises:
        UnwrittenError: it cannot be written.
    """
    page = run_page(
        outcome.job,
        outcome.trace,
        outcome.summary,
        title=outcome.title,
        facts=outcome_lines(outcome),
    )
    write(path, render(page))
