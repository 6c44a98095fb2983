"""All faults of the executor and of runtimes, with those who have to find each."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from faults.fault import BackEnd, Fault, Mutant
from faults.of_executor import buffers, calls, checkpoints, streams
from faults.of_executor.dropped_waits import WaitSite
from faults.of_executor.fsdp_waits import FOUND
from faults.of_executor.patches import (
    ADDING,
    ALONE,
    DROPPED,
    FLYING,
    MOVED,
    NVME,
    PINNED,
    PLAIN,
    SLICED,
    STAYING,
    VALUES,
    WITNESSED,
    Plant,
    read_changes,
)
from faults.of_executor.runtimes import BUGS, Bug

ExecutorFault = Fault[str, Plant]
BY_PLAIN_LOOP = {VALUES, NVME, PLAIN, STAYING, ALONE, MOVED, SLICED, DROPPED, ADDING, PINNED}


def _planted_in(module: ModuleType) -> Iterator[Plant]:
    """Yield plants of a module, alone or in tuples."""
    for value in vars(module).values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Plant):
                yield each


def _judges(run: str) -> frozenset[str]:
    """Return the checkers of a run, of which one has to find a fault."""
    if run.startswith(WITNESSED):
        return frozenset({"witnesses"})
    if run in BY_PLAIN_LOOP or run == FLYING:
        return frozenset({"values", "memory", "error"})
    if " " in run and run.split(maxsplit=1)[0] in ("ranks", "stages", "four"):
        return frozenset({"values", "witnesses", "memory", "error"})
    return frozenset({"clocks", "collectives", "streams", "memory", "refused", "error"})


def _faults(group: str, plants: Iterable[Plant], prefix: str = "") -> Iterator[ExecutorFault]:
    for each in plants:
        made = replace(each, group=group, run=f"{prefix}{each.run}")
        PLANTS[made.id] = made
        yield Fault(
            made.name,
            group,
            BackEnd.EXECUTOR,
            frozenset({"clocks"}) if group == "streams" else _judges(made.run),
            lambda _, __, made=made: [  # type: ignore[misc]
                Mutant.of(made.name, made, (made.why,) if made.why else ())
            ],
            applies=lambda run, made=made: run == made.run,  # type: ignore[misc]
            harmless=made.same,
        )


PLANTS: dict[str, Plant] = {}
"""Plants by their names in the table: ranks get the name alone."""
CHANGES: tuple[ExecutorFault, ...] = (
    *(
        each
        for group in ("waits", "memory", "flights", "units", "trainers")
        for each in _faults(group, read_changes(group))
    ),
    *_faults("streams", _planted_in(streams)),
)
"""Changes of the executor that runs with values, recordings or witnesses show."""
WITNESSED_FAULTS: tuple[ExecutorFault, ...] = (
    *_faults("calls", _planted_in(calls), WITNESSED),
    *_faults("buffers", _planted_in(buffers), WITNESSED),
    *_faults("checkpoints", _planted_in(checkpoints), WITNESSED),
)
"""Executors that do not do what they say, which witnesses alone have to find."""
RUNTIMES: tuple[Fault[str, Bug], ...] = tuple(
    Fault(
        name.replace("_", " "),
        "runtimes",
        BackEnd.EXECUTOR,
        frozenset({kind}),
        lambda _, __, bug=bug: [Mutant.of(bug.__name__, bug, (bug.__name__,))],  # type: ignore[misc]
    )
    for name, (kind, bug) in BUGS.items()
)
"""Bugs of released runtimes, which a recording has to find."""
WAITS_OF_FSDP2: tuple[Fault[str, WaitSite], ...] = tuple(
    Fault(
        " ".join(site),
        "FSDP2",
        BackEnd.EXECUTOR,
        frozenset({"race", "reuse", "host race"}),
        lambda _, __, site=site: [Mutant.of(site.source, site)],  # type: ignore[misc]
        applies=lambda run, name=name: run == name,  # type: ignore[misc]
    )
    for site, name in FOUND.items()
)
"""Waits of FSDP2 that are dropped, which a recording has to find."""
FAULTS_OF_EXECUTOR: tuple[Fault[Any, Any], ...] = (
    *CHANGES,
    *WITNESSED_FAULTS,
    *RUNTIMES,
    *WAITS_OF_FSDP2,
)
