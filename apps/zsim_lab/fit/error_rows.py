"""Rows of published runs that the error rules are fitted to and judged by."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import log

from zsim.prediction.error_columns import (
    OF_RUNTIME,
    changed,
    peak_columns,
    ratio_columns,
    time_columns,
)
from zsim.prediction.error_rule import ErrorRules
from zsim.prediction.evidence import JudgedRun, MemoryOutcome
from zsim_lab.fit.error_fit import ErrorFit, ErrorRow, FitRow, fitted_fit

MOST_CHANGED = 3
"""Maximum number of choices in which two runs of a pair differ."""

ANOTHER = "another "
"""Prefix of the names of columns for differences between two runs."""

SAME = (
    *("model.vocab_size", "model.attention_heads", "model.key_value_heads"),
    *("model.intermediate_size", "model.tied_embeddings"),
    *("cluster.node", "cluster.topology", "cluster.fabric", "cluster.nics_per_node"),
)
"""Keys of the model and the cluster that two runs of a pair share, in addition to features."""


def rules_of(runs: Sequence[JudgedRun], outcomes: Sequence[MemoryOutcome]) -> ErrorRules:
    """Return the rules that are fitted to these runs, but for those that give no score."""
    kept = scored(runs)
    return ErrorRules(
        time=time_fit(time_rows(kept)).rule(),
        ratio=ratio_fit([row for row, _ in ratio_rows(kept)]).rule(),
        peak=ErrorFit(peak_rows(kept)).rule(),
        fit=fitted_fit(fit_rows(outcomes)),
    )


def scored(runs: Sequence[JudgedRun]) -> list[JudgedRun]:
    """Return the runs from whose figures nothing was read."""
    return [run for run in runs if not run.fitted]


def time_fit(rows: Sequence[ErrorRow]) -> ErrorFit:
    """Return fits to step times: a runtime without published pipelines counts as the widest."""
    return ErrorFit(rows, widest=(OF_RUNTIME,))


def ratio_fit(rows: Sequence[ErrorRow]) -> ErrorFit:
    """Return fits to pairs: no run of a pair is the first, and unknown choices are the widest."""
    return ErrorFit(rows, is_symmetric=True, widest=(ANOTHER, OF_RUNTIME))


def time_rows(runs: Sequence[JudgedRun]) -> list[ErrorRow]:
    """Return a row for each step time."""
    return [
        ErrorRow(
            run.publication, log(run.predicted_step_s / run.step_s), time_columns(run.features)
        )
        for run in runs
    ]


def peak_rows(runs: Sequence[JudgedRun]) -> list[ErrorRow]:
    """Return a row for each peak of memory.

    Peaks are from four publications, so the groups are sweeps: runs of one model on one machine.
    """
    return [
        ErrorRow(
            f"{run.publication}, {run.sweep}",
            log(run.predicted_peak_bytes / run.peak_bytes),
            peak_columns(run.features),
        )
        for run in runs
        if run.peak_bytes is not None and run.predicted_peak_bytes is not None
    ]


def fit_rows(outcomes: Sequence[MemoryOutcome]) -> list[FitRow]:
    """Return a row for each run with a known outcome in memory."""
    return [FitRow(each.group, each.needed_bytes, each.usable_bytes, each.ran) for each in outcomes]


def ratio_rows(runs: Sequence[JudgedRun]) -> list[tuple[ErrorRow, int]]:
    """Return a row for each pair of runs that differ in few choices, and in how many."""
    return list(_pairs(runs))


def _pairs(runs: Sequence[JudgedRun]) -> Iterator[tuple[ErrorRow, int]]:
    of_subject: defaultdict[object, list[JudgedRun]] = defaultdict(list)
    for run in runs:
        same = tuple(str(run.settings.get(key)) for key in SAME)
        found = run.features
        subject = (found.runtime, found.constants, found.width, found.layers)
        of_subject[run.publication, subject, same].append(run)
    for own in of_subject.values():
        for one, other in combinations(own, 2):
            count = len(changed(one.features, other.features))
            if count > MOST_CHANGED:
                continue
            columns = ratio_columns(one.features, other.features)
            if columns is not None and (count or _settings(one) != _settings(other)):
                error = log(one.predicted_step_s * other.step_s)
                error -= log(one.step_s * other.predicted_step_s)
                yield ErrorRow(one.publication, error, columns), count


def _settings(run: JudgedRun) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(run.settings.items()))
