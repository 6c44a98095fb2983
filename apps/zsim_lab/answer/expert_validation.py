"""Compare predicted exchanges and layers of experts with published measurements."""

from os import PathLike
from pathlib import Path

from zsim_lab.answer.validation import Validation
from zsim_lab.rows.measurements import expert_rows
from zsim_lab.verdict.expert_verdict import expert_verdict


def validate_experts(folder: str | PathLike[str]) -> Validation:
    """Return the errors of predicted exchanges and layers of experts in the tables of `folder`.

    Raises:
        MistakeError: there is nothing to read.
    """
    found = [
        expert_verdict(name, rows, left) for name, (rows, left) in expert_rows(Path(folder)).items()
    ]
    return Validation(verdicts={"": found}, more={})
