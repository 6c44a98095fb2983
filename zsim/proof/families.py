"""The families of the proof: those of zsim, and those of other packages.

A package registers a family as an entry point of the group "zsim.invariants": its name, and a
`Family`. It is checked after those of zsim of the same stage.
"""

from collections.abc import Mapping
from functools import cache

from zsim.entry_point import registered
from zsim.proof import (
    alignment,
    formats,
    generators,
    host_order,
    lifetime,
    matching,
    memory,
    places,
    progress,
    races,
    scalars,
    scales,
    values,
    volume,
)
from zsim.proof.family import Family, Stage

GROUP = "zsim.invariants"
_MODULES = {
    Stage.ORDER: (matching, progress, lifetime, races, host_order),
    Stage.VALUES: (values, scalars, formats, scales, places, generators),
    Stage.PROMISES: (memory, volume, alignment),
}
"""The modules of the families, in the order of their findings; progress finds two invariants."""

SHIPPED = tuple(
    Family(name=each.INVARIANT, stage=stage, examine=each.examine, proves=each.proves)
    for stage, modules in _MODULES.items()
    for each in modules
)


@cache
def families() -> Mapping[str, Family]:
    """Return every installed family by name.

    Raises:
        EntryPointError: a name is registered twice, or an object is no `Family`.
    """
    return registered(GROUP, Family, {each.name: each for each in SHIPPED})


def of_stage(stage: Stage) -> tuple[Family, ...]:
    """Return the families of a stage, in the order of their findings."""
    return tuple(each for each in families().values() if each.stage is stage)
