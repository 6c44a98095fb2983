"""Results that are computed from a model once, and kept while the model is alive."""

from collections.abc import Callable, Hashable
from typing import TypeVar, cast
from weakref import finalize

from zsim.model.model import Model
from zsim.model.pipeline_stages import Stage, stages, virtual_stages
from zsim.strategy.strategy import Strategy

Result = TypeVar("Result")

_KNOWN: dict[int, dict[Hashable, object]] = {}
"""Results by key, of each living model by its `id`."""


def kept_by_model(model: Model, key: Hashable, compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`; of one model and `key` it is computed once.

    A result must not refer to the model, which would then live forever.
    """
    known = _KNOWN.get(id(model))
    if known is None:
        known = _KNOWN[id(model)] = {}
        finalize(model, _KNOWN.pop, id(model), None).atexit = False
    if key not in known:
        known[key] = compute()
    return cast("Result", known[key])


def kept_stages(model: Model, strategy: Strategy) -> tuple[Stage, ...]:
    """Return the stages of a model under a strategy; settings that split it alike share them."""
    runtime = strategy.zero.emulate
    forms = runtime is not None and runtime.stages_in_v, runtime is not None and runtime.ties_ends
    key = "stages", strategy.parallel.pipeline, tuple(virtual_stages(model, strategy)), forms
    return kept_by_model(model, key, lambda: stages(model, strategy))
