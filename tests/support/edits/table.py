"""How many edits of each kind are wrong, by schedule, and how many of those a proof refuses.

    PYTHONPATH=tests/support python -m edits.table --out edits.json --count 6 --sites 2
    PYTHONPATH=tests/support python -m edits.table --columns "stage 3" fsdp2 --only "any field"

What is written is a list of cells; names of what is wrong and passed stand in `missed`.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np

from edits import OPERATORS, Edit, edits
from edits.aims_of_frozen import FROZEN
from edits.aims_of_gradients import GRADIENTS
from edits.aims_of_peers import PEERS
from edits.aims_of_random import RANDOM
from edits.aims_of_regions import REGIONS
from edits.aims_of_rules import RULES
from edits.aims_of_scaling import SCALING
from edits.aims_of_updates import UPDATES
from edits.columns import Case, cases, strategies
from zsim.proof import check

AIMED = {**UPDATES, **RULES, **GRADIENTS, **SCALING, **REGIONS, **RANDOM, **FROZEN, **PEERS}
"""Named kinds of edits."""


@dataclass
class Cell:
    """One kind of edits of the schedules of one column.

    Of `drawn` edits, `kinds` counts how they were judged; of those that are wrong `caught` were
    refused. `refused_harmless` were refused though nothing was seen to be wrong.
    """

    column: str
    kind: str
    drawn: int = 0
    effective: int = 0
    caught: int = 0
    refused_harmless: int = 0
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    missed: list[str] = field(default_factory=list[str])
    raised: list[str] = field(default_factory=list[str])

    def add(self, case: Case, edit: Edit, rng: np.random.Generator) -> None:
        """Judge an edit, and see whether it is refused."""
        verdict = case.court.judge(edit.schedule, rng)
        self.drawn += 1
        self.kinds[verdict.kind] = self.kinds.get(verdict.kind, 0) + 1
        try:
            findings = check(edit.schedule, case.model)
        except Exception as error:
            self.raised.append(f"{edit.text}: {type(error).__name__}: {error}"[:300])
            return
        if not verdict.is_wrong:
            self.refused_harmless += bool(findings)
            return
        self.effective += 1
        self.caught += bool(findings)
        if not findings:
            strategy = case.court.strategy
            self.missed.append(f"{edit.text} [{verdict.kind}: {verdict.why}] {strategy}"[:700])


def seeded(seed: int, *words: str) -> np.random.Generator:
    """A generator that belongs to `words` alone."""
    return np.random.default_rng([seed, *(crc32(word.encode()) for word in words)])


def drawn_cells(
    column: str, among: Sequence[Case], names: Iterable[str], *, count: int, seed: int
) -> Iterator[Cell]:
    """`count` edits by each operator, dealt out to the schedules of a column."""
    for name in names:
        cell = Cell(column, name)
        for number, case in enumerate(among):
            rng = seeded(seed, column, name, str(number))
            share = (count + number) // len(among)
            for edit in edits(OPERATORS[name], case.schedule, rng, share):
                cell.add(case, edit, rng)
        yield cell


def aimed_cells(
    column: str, among: Sequence[Case], names: Iterable[str], *, sites: int, seed: int
) -> Iterator[Cell]:
    """Up to `sites` edits of each named kind, drawn among all that the column can express."""
    for name in names:
        cell = Cell(column, name)
        rng = seeded(seed, column, name)
        found = [(case, edit) for case in among for edit in AIMED[name](case.schedule)]
        for place in rng.permutation(len(found))[:sites].tolist():
            case, edit = found[place]
            cell.add(case, edit, rng)
        yield cell


def lines(cells: Sequence[Cell]) -> Iterator[str]:
    """The table, by kind over all columns."""
    yield f"{'kind':42}{'drawn':>7}{'wrong':>7}{'caught':>7}{'missed':>7}{'strict':>7}{'raised':>7}"
    for name in dict.fromkeys(each.kind for each in cells):
        yield _line(name, [each for each in cells if each.kind == name])
    yield _line("all", cells)


def _line(name: str, cells: Sequence[Cell]) -> str:
    drawn, wrong = sum(each.drawn for each in cells), sum(each.effective for each in cells)
    caught = sum(each.caught for each in cells)
    strict = sum(each.refused_harmless for each in cells)
    raised = sum(len(each.raised) for each in cells)
    return f"{name:42}{drawn:>7}{wrong:>7}{caught:>7}{wrong - caught:>7}{strict:>7}{raised:>7}"


def main(words: Sequence[str] | None = None) -> None:
    """Judge, print the table, and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--columns", nargs="*", default=list(strategies()))
    parser.add_argument("--only", nargs="*", default=[*OPERATORS, *AIMED])
    given = parser.parse_args(words)
    found: list[Cell] = []
    for column in given.columns:
        among = list(cases(column))
        operators = [name for name in OPERATORS if name in given.only]
        aimed = [name for name in AIMED if name in given.only]
        found += drawn_cells(column, among, operators, count=given.count, seed=given.seed)
        found += aimed_cells(column, among, aimed, sites=given.sites, seed=given.seed)
        print(_line(column, [each for each in found if each.column == column]), flush=True)  # noqa: T201 (it says how far it is)
        if given.out is not None:
            text = json.dumps([asdict(each) for each in found], indent=1)
            given.out.write_text(text, "utf-8")
    print(*lines(found), sep="\n")  # noqa: T201 (the table is what this is for)


if __name__ == "__main__":
    main()
