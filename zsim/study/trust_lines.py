"""Trust in the runs of a study, each thing said once."""

from collections import Counter
from collections.abc import Sequence

Judged = tuple[str, float | None]
"""What is said of a run, and the error that nine of ten predictions like it stay within."""


def said_once(trusts: Sequence[Judged]) -> tuple[str, ...]:
    """Return what is said of all runs; of several errors their range, and what the largest says.

    Sentences are made of clauses between semicolons, as the simulation writes them: what all say
    comes first, then what only some say.
    """
    errors = {text: error for text, error in trusts if error is not None}
    if len(errors) < 2:
        return _clauses([text for text, _ in trusts], len(trusts))
    count = sum(error is not None for _, error in trusts)
    least, most = min(errors.values()), max(errors.values())
    worst = max(errors, key=errors.__getitem__)
    within = f"{most:.1%}" if least == most else f"{least:.1%} to {most:.1%}"
    which = "one of them" if least == most else "where most"
    return (
        f"{count:,} of {len(trusts):,} runs: of published runs 9 of 10 step times are predicted "
        f"within {within}; {which}: {worst}",
        *_clauses([text for text, error in trusts if error is None], len(trusts)),
    )


def _clauses(texts: Sequence[str], whole: int) -> tuple[str, ...]:
    counts = Counter(texts)
    if len(counts) < 2 and len(texts) == whole:
        return tuple(counts)
    clauses = {sentence: sentence.split("; ") for sentence in counts}
    shared = [
        clause
        for clause in next(iter(clauses.values()), [])
        if len(texts) == whole and all(clause in each for each in clauses.values())
    ]
    lines = ["; ".join(shared)] if shared else []
    for sentence, count in counts.items():
        own = "; ".join(clause for clause in clauses[sentence] if clause not in shared)
        lines.append(f"{count:,} of {whole:,} runs: {own}")
    return tuple(lines)
