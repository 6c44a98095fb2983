"""Search space of the runtime."""

from zsim.runtimes.search import Knobs, SearchedAxes, SearchSpace


def knobs(axes: SearchedAxes) -> Knobs:
    """Return the options that a search varies, their defaults first."""
    return {"reshard_after_forward": (True, False)} if axes.stage == 3 else {}


SEARCH = SearchSpace(knobs=knobs, choices={"all-host": {"offload_policy": "cpu"}})
