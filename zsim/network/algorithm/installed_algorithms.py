"""The algorithms of collectives: those of zsim, and those of other packages.

A package registers an algorithm as an entry point of the group "zsim.algorithms": its name, and an
`Algorithm`. A scenario can then force it, the tuner considers it if `is_considered` allows, and
profiles can have its constants.
"""

from collections.abc import Mapping
from functools import cache

from zsim.cluster.profile.network import NetworkProfile
from zsim.entry_point import registered
from zsim.network.algorithm import constant
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Algorithm
from zsim.network.algorithm.constant import Constant
from zsim.network.algorithm.direct import Direct
from zsim.network.algorithm.hierarchical import Hierarchical
from zsim.network.algorithm.nvls import Nvls
from zsim.network.algorithm.ring import Ring
from zsim.network.algorithm.tree import Tree

GROUP = "zsim.algorithms"
SHIPPED: tuple[Algorithm, ...] = (Ring(), Tree(), Nvls(), Direct(), Hierarchical())
"""If two are equally fast, the tuner chooses the first."""

_RING = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


@cache
def algorithms() -> Mapping[str, Algorithm]:
    """Return every installed algorithm, by name."""
    return registered(GROUP, Algorithm, {each.name: each for each in SHIPPED})  # type: ignore[type-abstract]


@cache
def choices() -> tuple[str, ...]:
    """Return the algorithms that a scenario may force: those that support a ring's collectives."""
    shape = GroupShape(ranks=16, nodes=2)
    return tuple(
        name
        for name, each in algorithms().items()
        if any(each.link_bytes(collective, shape) for collective in _RING)
    )


@cache
def constants() -> tuple[Constant, ...]:
    """Return the constants of all algorithms, and the common ones."""
    own = (each for algorithm in algorithms().values() for each in algorithm.constants)
    return tuple(dict.fromkeys((*constant.COMMON, *own)))


def check(profile: NetworkProfile) -> None:
    """Raise ProfileError unless `profile` has all constants, with valid values, and no others.

    Raises:
        ProfileError: a constant is missing, unknown or invalid; one line.
    """
    constant.check(profile, constants())
