"""The table of all faults: group, name, and who has to find each.

    PYTHONPATH=tests/support python -m faults.table
    PYTHONPATH=tests/support python -m faults.table --judge "stage 3" --only "drawn: any field"

The first prints the table; with columns of schedules the faults of schedules are judged.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from faults.cases import cases, strategies
from faults.fault import Fault
from faults.judge import Cell, cell, lines
from faults.of_schedules.registry import FAULTS_OF_SCHEDULES, JUDGED


def every_fault() -> tuple[Fault[Any, Any], ...]:
    """Return the faults of all back ends; those of the executor import torch."""
    from faults.of_executor.registry import FAULTS_OF_EXECUTOR  # noqa: PLC0415
    from faults.of_traces import FAULTS_OF_TRACES  # noqa: PLC0415

    return (*FAULTS_OF_SCHEDULES, *FAULTS_OF_EXECUTOR, *FAULTS_OF_TRACES)


def rows(faults: Sequence[Fault[Any, Any]]) -> Iterator[str]:
    """Yield the table, a line for each fault."""
    for each in faults:
        who = ", ".join(sorted(each.found_by)) or "none"
        harmless = f" ({each.harmless})" if each.harmless else ""
        yield f"{each.back_end:10}{each.id:72}{who}{harmless}"
    yield f"{len(faults)} faults"


def cells(
    column: str,
    wanted: Mapping[str, tuple[int, int]],
    *,
    otherwise: tuple[int, int],
    only: Sequence[str] = (),
) -> Iterator[Cell]:
    """Yield verdicts about faults in the schedules of a column.

    Of each fault so many wrong mutants are wanted as `wanted` says by group, in so many tries.
    """
    jobs = list(cases(column))
    for fault in JUDGED:
        if not only or fault.id in only:
            yield cell(fault, column, jobs, *wanted.get(fault.group, otherwise))


def main(words: Sequence[str] | None = None) -> None:
    """Print the table, or the table of detection."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge", nargs="*", choices=list(strategies()), metavar="COLUMN")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--wanted", type=int, default=6)
    given = parser.parse_args(words)
    if given.judge is None:
        print(*rows(every_fault()), sep="\n")  # noqa: T201  # the table is what this is for
        return
    found = [
        each
        for column in given.judge
        for each in cells(column, {}, otherwise=(given.wanted, 2 * given.wanted), only=given.only)
    ]
    print(*lines(found), sep="\n")  # noqa: T201  # the table is what this is for
    print(*(one.fails for each in found for one in each.verdicts if one.fails), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
