"""The algorithms of collectives: those of zsim, and those of other packages.

A package registers an algorithm as an entry point of the group "zsim.algorithms": its name, and an
`Algorithm`. A scenario may then force it, the tuner considers it if it wants to be considered, and
profiles may have its constants.
"""

from collections.abc import Mapping
from functools import cache

from zsim.cluster.profile.network import NetworkProfile
from zsim.entry_point import registered
from zsim.network import constant
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Algorithm
from zsim.network.algorithm.direct import Direct
from zsim.network.algorithm.hierarchical import Hierarchical
from zsim.network.algorithm.nvls import Nvls
from zsim.network.algorithm.ring import Ring
from zsim.network.algorithm.tree import Tree
from zsim.network.constant import Constant

GROUP = "zsim.algorithms"
SHIPPED: tuple[Algorithm, ...] = (Ring(), Tree(), Nvls(), Hierarchical(), Direct())
"""Of two that are as fast, the tuner takes the first."""

_RING = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


@cache
def algorithms() -> Mapping[str, Algorithm]:
    """Return every algorithm that is installed, by name."""
    return registered(GROUP, Algorithm, {each.name: each for each in SHIPPED})  # type: ignore[type-abstract]


@cache
def choices() -> tuple[str, ...]:
    """Return the algorithms that a scenario may force: those that can do what a ring can do."""
    shape = GroupShape(ranks=16, nodes=2)
    return tuple(
        name
        for name, each in algorithms().items()
        if any(each.link_bytes(collective, shape) for collective in _RING)
    )


@cache
def constants() -> tuple[Constant, ...]:
    """Return the constants of all algorithms, and those that all share."""
    own = (each for algorithm in algorithms().values() for each in algorithm.constants)
    return tuple(dict.fromkeys((*constant.COMMON, *own)))


def check(profile: NetworkProfile) -> None:
    """Check that `profile` has the constants of all algorithms, each as it may be, and no others.

    Raises:
        ProfileError: it does not; one line.
    """
    constant.check(profile, constants())
