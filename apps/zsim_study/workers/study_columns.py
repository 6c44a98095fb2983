"""The rows of a study as plain values by column, for CSV and JSON."""

import csv
import re
from io import StringIO

from zsim_study.study.result import StudyResult
from zsim_study.study.row import StudyRow

NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
FIGURES = (
    "step_time_s",
    "exposed_communication_s",
    "host_bound_s",
    "tokens_per_s",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "usable_bytes",
)
"""Fields of a summary that are columns, units last."""


def columns(result: StudyResult, row: StudyRow) -> dict[str, object]:
    """Return one row: axes, then status, figures (None if missing), and cost."""
    outcome, meets = row.outcome, row in result.ranking.accepted
    found: dict[str, object] = dict(zip(result.axes, row.labels, strict=True))
    found |= {
        "status": outcome.status.value,
        "reason": outcome.reason,
        "meets_goal": meets,
        "gpus": row.gpus or None,
        "micro_batch_size": row.micro_batch_size or None,
        "gradient_accumulation_steps": row.accumulation_steps or None,
    }
    summary = outcome.summary
    for name in FIGURES:
        found[name] = None if summary is None else getattr(summary, name)
    found["peak_reserved_bytes"] = None if summary is None else summary.reserved_bytes
    life = None if summary is None else summary.drive_life
    found["written_to_drives_bytes_per_day"] = None if life is None else life.bytes_per_day
    found["drive_life_days"] = None if life is None else life.days
    found["cost_per_million_tokens"] = row.cost_per_million_tokens
    found["error"] = None if outcome.error is None else outcome.error.half_width
    return found


def csv_text(result: StudyResult) -> str:
    """Return the rows as CSV, in the order of the study; missing values are empty."""
    rows = [
        {_inert(name): _inert(cell) for name, cell in columns(result, row).items()}
        for row in result.rows
    ]
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _inert(cell: object) -> object:
    """Return a cell that no spreadsheet evaluates: text that looks like a formula gets a quote.

    OWASP, "CSV Injection", lists these first characters. Numbers are not quoted.
    """
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    return cell if NUMBER.fullmatch(cell) else f"'{cell}"
