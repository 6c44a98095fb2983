"""Kinds of units of a model and of its pipeline stages, which are kinds of the whole model."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from zsim.closed_form.by_model import alike_units, kept_by_model, kept_stages
from zsim.model.model import Model, Unit
from zsim.model.pipeline_stages import Stage
from zsim.strategy.strategy import Strategy

Result = TypeVar("Result")

_KEY = "kinds of units"


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Kinds of a part's units in their order, and results that parts with equal kinds share."""

    own: tuple[int, ...]
    shared: dict[Hashable, object]


def units_by_kind(model: Model, again: Set[str]) -> Iterator[tuple[Unit, int, bool]]:
    """Yield a unit of each kind, the number of its kind, and whether these are among `again`."""
    for unit, names in alike_units(model):
        for is_again, many in Counter(name in again for name in names).items():
            yield unit, many, is_again


def stages_of(model: Model, strategy: Strategy) -> tuple[Stage, ...]:
    """Return the stages of a model; units of their models are not grouped by kind again."""
    made = kept_stages(model, strategy)
    kept_by_model(model, ("kinds of stages", id(made)), partial(_set_kinds, model, made))
    return made


def _set_kinds(model: Model, made: Sequence[Stage]) -> None:
    """Keep the kinds of the units of all stages and chunks; they are kinds of `model`."""
    kinds = kept_by_model(model, "kind of each unit", partial(_kind_of_each, model))
    shared = kept_by_model(model, "results by kinds", dict[Hashable, object])
    for stage in made:
        for part in (stage.model, *(chunk.model for chunk in stage.chunks)):
            kept_by_model(part, "alike units", partial(_grouped, part.units, kinds))
            if model.architecture is not None:
                kept_by_model(part, _KEY, partial(_kinds_of, part.units, kinds, shared))


def kept_by_kinds(model: Model, key: Hashable, compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`; parts of a model with equal kinds of units share it.

    It may depend on `key`, on the kinds and on their order. Parts come from `stages_of`; units of a
    kind differ only in names if the model was built from an architecture.
    """
    known = kept_by_model(model, _KEY, lambda: None)
    if known is None:
        return kept_by_model(model, key, compute)
    assert isinstance(known, _Kinds)
    place = known.own, key
    if place not in known.shared:
        known.shared[place] = compute()
    return cast("Result", known.shared[place])


def _kinds_of(
    units: Sequence[Unit], kinds: Mapping[str, int], shared: dict[Hashable, object]
) -> _Kinds:
    return _Kinds(tuple(kinds[unit.name] for unit in units), shared)


def _kind_of_each(model: Model) -> dict[str, int]:
    return {name: kind for kind, (_, names) in enumerate(alike_units(model)) for name in names}


def _grouped(
    units: Sequence[Unit], kinds: Mapping[str, int]
) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
    found: dict[int, tuple[Unit, list[str]]] = {}
    for unit in units:
        found.setdefault(kinds[unit.name], (unit, []))[1].append(unit.name)
    return tuple((first, tuple(names)) for first, names in found.values())
