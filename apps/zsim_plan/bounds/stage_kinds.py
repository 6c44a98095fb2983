"""Kinds of units of a model and of its pipeline stages, which are kinds of the whole model."""

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial

from zsim.closed_form.by_model import alike_units, kept_by_model, kept_stages
from zsim.model.model import Model, Unit
from zsim.model.pipeline_stages import Stage
from zsim.strategy.strategy import Strategy


def units_by_kind(model: Model, again: Set[str]) -> Iterator[tuple[Unit, int, bool]]:
    """Yield a unit of each kind, the number of its kind, and whether these are among `again`."""
    for unit, names in alike_units(model):
        many = sum(name in again for name in names)
        counts = (many, True), (len(names) - many, False)
        yield from ((unit, count, is_again) for count, is_again in counts if count)


def stages_of(model: Model, strategy: Strategy) -> tuple[Stage, ...]:
    """Return the stages of a model; units of their models are not grouped by kind again."""
    made = kept_stages(model, strategy)
    kinds = {name: kind for kind, (_, names) in enumerate(alike_units(model)) for name in names}
    for stage in made:
        for part in (stage.model, *(chunk.model for chunk in stage.chunks)):
            kept_by_model(part, "alike units", partial(_grouped, part.units, kinds))
    return made


def _grouped(
    units: Sequence[Unit], kinds: Mapping[str, int]
) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
    found: dict[int, tuple[Unit, list[str]]] = {}
    for unit in units:
        found.setdefault(kinds[unit.name], (unit, []))[1].append(unit.name)
    return tuple((first, tuple(names)) for first, names in found.values())
