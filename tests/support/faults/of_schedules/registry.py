"""All faults of schedules, with the families that have to find each.

A fault of values is found by its family where the order of operations is right; families of order
may find it first (`Case.instead`).
"""

from functools import partial

import numpy as np
from equal_micro_batches import made, planted

from faults.changes import Aim, Edit
from faults.fault import BackEnd, Fault, Mutant, drawing, enumerated, one_of
from faults.of_schedules.blocks import in_every_block
from faults.of_schedules.contents import (
    other_groups,
    other_reductions,
    other_scales,
    other_sizes,
    overwritten,
    skipped,
    stale,
    uneven,
)
from faults.of_schedules.drawn_edits import DRAWN
from faults.of_schedules.each_micro_batch import changed_in_each
from faults.of_schedules.frozen import FROZEN
from faults.of_schedules.generators import RANDOM
from faults.of_schedules.gradients import GRADIENTS
from faults.of_schedules.life import aliased, freed_early, never_freed, used_again_elsewhere
from faults.of_schedules.order import (
    branched_apart,
    collectives_swapped,
    prefetched,
    without_an_edge,
)
from faults.of_schedules.peers import PEERS
from faults.of_schedules.rules import RULES
from faults.of_schedules.scaling import SCALING
from faults.of_schedules.some_micro_batches import changed_alike
from faults.of_schedules.updates import UPDATES
from faults.of_schedules.windows import WINDOWS
from faults.of_schedules.wrong_micro_batches import WRONG
from zsim.schedule.schedule import Schedule

ScheduleFault = Fault[Schedule, Schedule]
VALUES = frozenset({"values"})
COUNTS = frozenset({"values", "scalars"})
ORDER = frozenset({"lifetime", "races", "matching", "progress", "host_order"})
SEEN_IN_ORDER = frozenset({"values", "scalars", "formats", "scales", "places", "generators"})
ANY = ORDER | SEEN_IN_ORDER | {"memory", "volume", "alignment"}


def _aimed(
    group: str,
    operators: dict[str, Aim],
    found_by: dict[str, str | frozenset[str]] | None = None,
    harmless: dict[str, str] | None = None,
) -> tuple[ScheduleFault, ...]:
    return enumerated(
        group, BackEnd.SCHEDULE, operators, found_by or {}, otherwise=VALUES, harmless=harmless
    )


AIMED: tuple[ScheduleFault, ...] = (
    *_aimed(
        "updates",
        UPDATES,
        {
            "step counted twice": COUNTS,
            "step not counted": COUNTS,
            "first step is the second": "scalars",
            "master in a poorer format": "formats",
            "moment in a poorer format": "formats",
            "parameter in a poorer format": "formats",
            "reduction is not waited for": "races",
            "cast or gather before the update": ORDER,
        },
        {"reduction is not waited for": "something else waits"},
    ),
    *_aimed("rules", RULES),
    *_aimed(
        "gradients",
        GRADIENTS,
        {
            "ranks added up in bf16": "formats",
            "ranks added up in fp16": "formats",
            "gradients kept in bf16": "formats",
            "gradients kept in fp8": "formats",
            "free waits for nothing": ORDER,
            "reduced twice": ORDER,
        },
        {"padding or accumulator not zeroed": "padding that a collective carries, read by nobody"},
    ),
    *_aimed(
        "scaling",
        SCALING,
        {
            "norm in bf16": "formats",
            "norm too early": ORDER,
            "norm reduced twice": ORDER,
            "flag too early": ORDER,
            "flag of this rank alone": ORDER,
            "flag zeroed": ORDER | VALUES,
            "flag not found on one rank": ORDER,
            "step counted on overflow": "scalars",
            "scale does not fall": "scalars",
            "scale falls further": "scalars",
            "scale falls below its least": "scalars",
            "scale never grows": "scalars",
            "scale grows at another interval": "scalars",
            "scale grows in every step": "scalars",
            "scale grows before it is used": COUNTS,
            "unscaled by good steps": COUNTS,
            "good steps are not forgotten": "scalars",
            "good steps begin at 1": "scalars",
            "loss scale begins otherwise": "scalars",
        },
        {
            "good steps counted on overflow": "they are forgotten at once",
            "skipped steps are not counted": "nothing reads them",
            "flag a sum": "a sum of flags is zero where all are",
        },
    ),
    *_aimed("windows", WINDOWS),
    *_aimed("random numbers", RANDOM, dict.fromkeys(RANDOM, "generators")),
    *_aimed("frozen", FROZEN, {"frozen parameter not gathered": "volume"}),
    *_aimed("peers", PEERS, dict.fromkeys(PEERS, ANY)),
)
"""Named faults, whose mutants are made when they are listed."""
AIMED_BY_NAME = {each.name: each for each in AIMED}

LIFE = frozenset({"lifetime", "races", "memory", "values"})
_SITES: dict[str, tuple[Aim, frozenset[str]]] = {
    "drop an edge": (without_an_edge, ORDER | VALUES),
    "swap two collectives in one role": (collectives_swapped, ORDER | VALUES),
    "change a group": (other_groups, ORDER | {"volume", "values"}),
    "change a size": (other_sizes, ORDER | {"volume", "values"}),
    "change a reduction": (other_reductions, frozenset({"values", "scalars"})),
    "change a scale": (other_scales, frozenset({"values", "scalars", "scales"})),
    "free early": (freed_early, LIFE),
    "never free": (never_freed, LIFE),
    "alias two buffers": (aliased, LIFE),
    "skip a bucket": (skipped, ORDER | {"volume", "values"}),
    "reuse a buffer across streams": (used_again_elsewhere, LIFE),
    "prefetch past the cap": (prefetched, ORDER | {"memory", "volume", "values"}),
    "take the branch on one rank only": (branched_apart, ANY),
    "overwrite instead of accumulate": (overwritten, VALUES),
    "stale parameter": (stale, ORDER | {"volume", "values"}),
    "uneven last bucket": (uneven, ORDER | {"volume", "values", "alignment"}),
}
"""Faults at every place of a schedule of one role, where a finding has to name the place."""
AT_EVERY_PLACE: tuple[ScheduleFault, ...] = tuple(
    Fault(
        name,
        "places",
        BackEnd.SCHEDULE,
        found_by,
        lambda schedule, _, operator=operator: operator(schedule),  # type: ignore[misc]
        applies=lambda schedule: len(schedule.programs) == 1,
    )
    for name, (operator, found_by) in _SITES.items()
)
DRAWN_FAULTS: tuple[ScheduleFault, ...] = tuple(
    Fault(name, "drawn", BackEnd.SCHEDULE, ANY, drawing(draw), is_endless=True)
    for name, draw in DRAWN.items()
)
MICRO_BATCHES: tuple[ScheduleFault, ...] = tuple(
    Fault(
        name,
        "micro-batches",
        BackEnd.SCHEDULE,
        VALUES,
        lambda _, __, name=name: [Mutant(name, partial(planted, WRONG[name], 0))],  # type: ignore[misc]
        applies=lambda schedule: schedule == made()[0],
    )
    for name in WRONG
)
"""Faults of one of many micro-batches that are alike, on the first stage of two."""


def _in_any_place(schedule: Schedule, rng: np.random.Generator) -> Edit:
    return one_of(rng, [DRAWN[name] for name in sorted(DRAWN)])(schedule, rng)


ONE, EACH, SOME, SOME_TWICE, BLOCKS = REPEATED = tuple(
    Fault(name, "repeated", BackEnd.SCHEDULE, ANY, drawing(draw), is_endless=True)
    for name, draw in (
        ("one place alone", _in_any_place),
        ("the same in each micro-batch", changed_in_each),
        ("the same in some micro-batches", changed_alike),
        ("two changes of some micro-batches", partial(changed_alike, count=2)),
        ("the same in every block", in_every_block),
    )
)
"""Changes that proofs by fewer micro-batches or blocks have to find as proofs of the whole do."""
JUDGED = (*AT_EVERY_PLACE, *AIMED, *DRAWN_FAULTS)
"""Faults of any schedule, which are judged by running it."""
FAULTS_OF_SCHEDULES = (*JUDGED, *MICRO_BATCHES, *REPEATED)
