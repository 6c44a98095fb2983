"""Trust in the runs of a study, each thing said once."""

from collections import Counter
from collections.abc import Sequence


def said_once(trusts: Sequence[str]) -> tuple[str, ...]:
    """Return what all of `trusts`, a sentence of each run, say; then what only some say.

    Sentences are made of clauses between semicolons, as the simulation writes them.
    """
    counts = Counter(trusts)
    if len(counts) < 2:
        return tuple(counts)
    clauses = {sentence: sentence.split("; ") for sentence in counts}
    shared = [
        clause
        for clause in next(iter(clauses.values()))
        if all(clause in each for each in clauses.values())
    ]
    lines = ["; ".join(shared)] if shared else []
    for sentence, count in counts.items():
        own = "; ".join(clause for clause in clauses[sentence] if clause not in shared)
        lines.append(f"{count:,} of {len(trusts):,} runs: {own.removeprefix('this run is ')}")
    return tuple(lines)
