"""Files of recorded counts of tokens for experts (`experts.counts`)."""

import csv
from collections.abc import Iterator
from io import StringIO

from zsim.scenario.tables import Scenario, ScenarioError

COLUMNS = ("micro_batch", "layer", "group", "source", "expert", "rows")
"""Columns of a file: whole numbers. The header has these names."""


def with_counts(scenario: Scenario, path: str, text: str) -> Scenario:
    """Return `scenario` with the counts in `text`, the file `path`.

    Raises:
        ScenarioError: it is not such a file.
    """
    try:
        rows = [*csv.reader(StringIO(text))]
    except csv.Error as error:
        raise ScenarioError(f"experts.counts: {path}: {error}") from None
    if not rows or tuple(each.strip() for each in rows[0]) != COLUMNS:
        raise ScenarioError(f"experts.counts: {path}: the first line must be {','.join(COLUMNS)}")
    found = tuple(_numbers(path, rows[1:]))
    table = scenario.experts.model_copy(update={"rows": found, "counts": None})
    return scenario.model_copy(update={"experts": table})


def _numbers(path: str, rows: list[list[str]]) -> Iterator[tuple[int, int, int, int, int, int]]:
    for line, row in enumerate(rows, start=2):
        if not row:
            continue
        try:
            batch, layer, group, source, expert, copies = map(int, row)
        except ValueError:
            what = f"must be {len(COLUMNS)} whole numbers"
            raise ScenarioError(f"experts.counts: {path}: line {line} {what}") from None
        yield batch, layer, group, source, expert, copies
