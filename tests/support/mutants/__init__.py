"""Mutations of schedules that are right, one operator for each class of faults.

They know nothing of `zsim.proof`: whether a mutant is wrong is decided by running it (`verdict`).
"""

from mutants.collective import CHANGE_GROUP, CHANGE_REDUCTION, CHANGE_SIZE
from mutants.divergence import BRANCH_ON_ONE
from mutants.edge import DROP_EDGE
from mutants.life import ALIAS, FREE_EARLY, NEVER_FREE, OTHER_HOME
from mutants.mutant import Mutant, Operator
from mutants.omission import OVERWRITE, SKIP_BUCKET, STALE
from mutants.order import PREFETCH, SWAP_COLLECTIVES
from mutants.scale import CHANGE_SCALE
from mutants.uneven import UNEVEN

__all__ = ["OPERATORS", "Mutant", "Operator"]

OPERATORS = (
    DROP_EDGE,
    SWAP_COLLECTIVES,
    CHANGE_GROUP,
    CHANGE_SIZE,
    CHANGE_REDUCTION,
    CHANGE_SCALE,
    FREE_EARLY,
    NEVER_FREE,
    ALIAS,
    SKIP_BUCKET,
    OTHER_HOME,
    PREFETCH,
    BRANCH_ON_ONE,
    OVERWRITE,
    STALE,
    UNEVEN,
)
