"""Volume of parameters and gradients over the data axes: each runtime has its own."""

from collections.abc import Callable
from dataclasses import dataclass

from zsim.model.model import Model
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def clipped_once(model: Model, strategy: Strategy) -> int:
    """Return 1 where gradients are clipped: one norm is reduced."""
    del model
    return 0 if strategy.clip_norm is None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataVolume:
    """The own part of a runtime: parameters and gradients, and how many norms it reduces."""

    data: Callable[[Model, Strategy], list[WireBytes]]
    norms: Callable[[Model, Strategy], int] = clipped_once
