"""Results that are computed from a model once, and kept while the model is alive."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
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


def elements_of(model: Model) -> tuple[int, int]:
    """Return the elements of all parameters and of trained parameters."""
    return kept_by_model(model, "elements", lambda: _elements_of(model))


def _elements_of(model: Model) -> tuple[int, int]:
    held = sum(each.elements for each in model.parameters)
    return held, held - sum(each.elements for each in model.parameters if each.frozen)


def kept_stages(model: Model, strategy: Strategy) -> tuple[Stage, ...]:
    """Return the stages of a model under a strategy; settings with the same split share them."""
    runtime = strategy.zero.emulate
    forms = runtime is not None and runtime.stages_in_v, runtime is not None and runtime.ties_ends
    key = "stages", strategy.parallel.pipeline, kept_split(model, strategy), forms
    return kept_by_model(model, key, lambda: _stages(model, strategy))


def _stages(model: Model, strategy: Strategy) -> tuple[Stage, ...]:
    """Return the stages; their models get the kinds of their units from the whole model."""
    kinds = {name: kind for kind, (_, names) in enumerate(alike_units(model)) for name in names}
    made = stages(model, strategy)
    for part in (part for stage in made for part in (stage.model, *_models(stage))):
        found: dict[int, tuple[Unit, list[str]]] = {}
        for unit in part.units:
            found.setdefault(kinds[unit.name], (unit, []))[1].append(unit.name)
        kept_by_model(part, "alike units", partial(_as_kinds, found))
    return made


def _models(stage: Stage) -> list[Model]:
    return [chunk.model for chunk in stage.chunks]


def _as_kinds(
    found: Mapping[int, tuple[Unit, Sequence[str]]],
) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
    return tuple((first, tuple(names)) for first, names in found.values())


def kept_split(model: Model, strategy: Strategy) -> tuple[int, ...]:
    """Return the virtual stage of each unit of a model under a strategy."""
    key = "virtual stages", strategy.parallel.pipeline, strategy.zero.emulate
    return kept_by_model(model, key, lambda: tuple(virtual_stages(model, strategy)))


def alike_units(model: Model) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
    """Return the units by kind: of one kind are units whose kernels and values have equal costs.

    A kind is its first unit and the names of all its units, in the order of the model.
    """
    return kept_by_model(model, "alike units", lambda: _grouped(model))


def units_by_kind(model: Model, again: Set[str]) -> Iterator[tuple[Unit, int, bool]]:
    """Yield a unit of each kind, the number of its kind, and whether these are among `again`."""
    for unit, names in alike_units(model):
        many = sum(name in again for name in names)
        if many:
            yield unit, many, True
        if many < len(names):
            yield unit, len(names) - many, False


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
