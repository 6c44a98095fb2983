"""Results that are computed from a model once, and kept while the model is alive."""

from collections.abc import Callable, Hashable
from typing import TypeVar, cast
from weakref import finalize

from zsim.model.model import Model, Segment, Unit, Value
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
    """Return the stages of a model under a strategy; settings with the same split share them."""
    runtime = strategy.zero.emulate
    forms = runtime is not None and runtime.stages_in_v, runtime is not None and runtime.ties_ends
    count = strategy.parallel.pipeline
    split = kept_by_model(
        model, ("virtual stages", count, runtime), lambda: tuple(virtual_stages(model, strategy))
    )
    key = "stages", count, split, forms
    return kept_by_model(model, key, lambda: stages(model, strategy))


def alike_units(model: Model) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
    """Return the units by kind: of one kind are units whose kernels and values have equal costs.

    A kind is its first unit and the names of all its units, in the order of the model.
    """
    return kept_by_model(model, "alike units", lambda: _grouped(model))


def _grouped(model: Model) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
    kinds: dict[Hashable, tuple[Unit, list[str]]] = {}
    for unit in model.units:
        kind = tuple(_kind(model, segment) for segment in unit.segments)
        kinds.setdefault(kind, (unit, []))[1].append(unit.name)
    return tuple((first, tuple(names)) for first, names in kinds.values())


def _kind(model: Model, segment: Segment) -> Hashable:
    """Return a key that is equal for segments of equal costs.

    Repeated blocks share the tuples of their kernels, so identity of these is enough.
    """
    return (
        id(segment.forward),
        id(segment.backward),
        id(segment.again),
        segment.begins,
        segment.ends,
        segment.saves_input,
        segment.runs_again,
        segment.sums_again,
        model.runs_backward(segment),
        tuple(_size(model.values[name]) for name in segment.inputs),
        tuple(_size(value) for value in segment.outputs),
    )


def _size(value: Value) -> Hashable:
    return value.elements, value.dtype, value.requires_gradient, value.tensor_sharded
