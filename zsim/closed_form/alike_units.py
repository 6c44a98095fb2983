"""Units of a model that have the same costs: a deep model repeats one block."""

from collections.abc import Hashable

from zsim.closed_form.by_model import kept_by_model
from zsim.model.model import Model, Segment, Unit, Value

Alike = tuple[tuple[Unit, tuple[str, ...]], ...]
"""The first unit of each kind, and the names of all units of this kind."""


def alike_units(model: Model) -> Alike:
    """Return the units by kind: of one kind are units whose kernels and values have equal costs.

    A kind lists the units in the order of the model; kinds are ordered by their first units.
    """
    return kept_by_model(model, "alike units", lambda: _grouped(model))


def _grouped(model: Model) -> Alike:
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
