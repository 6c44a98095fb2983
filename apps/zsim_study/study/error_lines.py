"""Summarize the errors of the runs of a study, without repeated lines."""

from collections import Counter
from collections.abc import Sequence

from zsim_study.study.outcome import StudyOutcome


def error_lines(outcomes: Sequence[StudyOutcome]) -> tuple[str, ...]:
    """Return lines on the errors of `outcomes`.

    Known intervals share one line, with the widest one and the range of widths. Runs with unknown
    error have one line per reason.
    """
    known = [outcome for outcome in outcomes if outcome.error is not None]
    lines: list[str] = []
    widths = sorted({outcome.error.half_width for outcome in known if outcome.error is not None})
    if widths:
        widest = max(known, key=_width)
        most = f"{widest.error_text}"
        if len(widths) > 1:
            most = f"±{widths[0]:.0%} to ±{widths[-1]:.0%}; where most: {widest.error_text}"
        lines.append(_of(len(known), len(outcomes), most))
    unknown = Counter(outcome.error_text for outcome in outcomes if outcome.error is None)
    lines += [_of(count, len(outcomes), text) for text, count in unknown.items()]
    return tuple(lines)


def _width(outcome: StudyOutcome) -> float:
    return 0.0 if outcome.error is None else outcome.error.half_width


def _of(count: int, whole: int, text: str) -> str:
    return text if count == whole else f"{count:,} of {whole:,} runs: {text}"
