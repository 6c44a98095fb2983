"""Models by name: shapes of published models, each with its source and its published size.

A family is a TOML file: its source, its models with the keys of `[model]`, and names that are
refused. Hugging Face names find the same models.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Self

from pydantic import ValidationError

from zsim.config_error import line, shown
from zsim.scenario.missing_keys import SHAPE
from zsim.scenario.model_titles import published_size
from zsim.scenario.tables import ModelTable, Scenario, ScenarioError
from zsim.strategy.config_table import Count, Table

NEAREST = 3
"""Maximum number of similar names in a message."""


class ActiveCount(StrEnum):
    """Conventions of published numbers of active parameters, which a token runs through.

    All exclude the experts that a token is not routed to.
    """

    ALL = "all"
    """All others."""
    WITHOUT_INPUT = "without_input"
    """Without the token embedding; a token reads only one row."""
    WITHOUT_EMBEDDINGS = "without_embeddings"
    """Without the token embedding and the output projection."""


class CatalogueModel(Table):
    """A model: its shape, and its published number of parameters.

    `active_parameters` is the published number of parameters that a token runs through, by the
    convention `active_counts`. A model has one of `parameters`, `stored_parameters` and
    `rounded_parameters`. Published files can store a tied output projection a second time; some
    sizes are published only rounded.
    """

    name: str
    hugging_face: tuple[str, ...] = ()
    parameters: Count | None = None
    stored_parameters: Count | None = None
    rounded_parameters: Count | None = None
    active_parameters: Count | None = None
    active_counts: ActiveCount = ActiveCount.ALL
    shape: ModelTable

    @property
    def published(self) -> str:
        """The published number of parameters, as text."""
        return published_size(self.model_dump())


class RefusedModels(Table):
    """Models that zsim does not support: patterns of their names, and the reason."""

    names: tuple[str, ...]
    why: str


class ModelFamily(Table):
    """Models of one publication; `parameters_source` is the source of their sizes."""

    family: str
    source: str
    parameters_source: str = ""
    model: tuple[CatalogueModel, ...] = ()
    refused: tuple[RefusedModels, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCatalogue:
    """Families of models, and each model by all its names."""

    families: tuple[ModelFamily, ...]
    _known: dict[str, tuple[ModelFamily, CatalogueModel]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known: dict[str, tuple[ModelFamily, CatalogueModel]] = {}
        for family in self.families:
            for model in family.model:
                for name in (model.name, *model.hugging_face):
                    known.setdefault(_key(name), (family, model))
        for family in self.families:  # also without organisation, if unambiguous
            for model in family.model:
                for name in model.hugging_face:
                    known.setdefault(_key(name).rpartition("/")[2], (family, model))
        object.__setattr__(self, "_known", known)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Return the catalogue of families in TOML."""
        return cls(tuple(ModelFamily.model_validate(tomllib.loads(each)) for each in texts))

    @property
    def models(self) -> tuple[CatalogueModel, ...]:
        """Every model, family by family."""
        return tuple(model for family in self.families for model in family.model)

    def find(self, name: str) -> tuple[ModelFamily, CatalogueModel]:
        """Return the model with this `name`, in any case, and its family.

        Raises:
            ScenarioError: there is none; the line gives the reason, or similar names.
        """
        key = _key(name)
        if key in self._known:
            return self._known[key]
        for family in self.families:
            for refused in family.refused:
                if any(fnmatchcase(key.rpartition("/")[2], each) for each in refused.names):
                    raise ScenarioError(f"model.name: {shown(name)} is {refused.why}")
        close = get_close_matches(key, self._known, n=2 * NEAREST, cutoff=0.5)
        near = list(dict.fromkeys(self._known[each][1].name for each in close))[:NEAREST]
        meant = f"; did you mean {' or '.join(near)}?" if near else ";"
        raise ScenarioError(
            f"model.name: {shown(name)} is not the name of a model{meant} "
            "zsim list models prints all"
        )

    def text(self, name: str) -> str:
        """Return the model `name` as the table `[model]` of a scenario, after its sources."""
        family, model = self.find(name)
        lines = [
            f"# {model.name} ({family.family}): {model.published}",
            f"# Shape: {family.source}",
            f"# Parameters: {family.parameters_source}",
        ]
        if model.hugging_face:
            lines.append(f"# On Hugging Face: {', '.join(model.hugging_face)}")
        lines.append("[model]")
        given = model.shape.model_dump(mode="json", exclude_unset=True)
        tables = {key: value for key, value in given.items() if isinstance(value, dict)}
        for key in tables:
            del given[key]
        lines += [f"{key} = {_toml_value(value)}" for key, value in given.items()]
        for part, table in tables.items():
            lines.append(f"[model.{part}]")
            lines += [f"{key} = {_toml_value(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"


def named(scenario: Scenario, catalogue: ModelCatalogue) -> Scenario:
    """Return `scenario` with the shape of its named model; keys of `[model]` take precedence.

    Raises:
        ScenarioError: there is no such model, or `[model]` also has a whole shape.
    """
    table = scenario.model
    if table.name is None:
        return scenario
    given = {key: getattr(table, key) for key in table.model_fields_set - {"name"}}
    for other in ("hf_config", "parameters"):
        if given.get(other) is not None:
            raise ScenarioError(f"model.name: {shown(table.name)} cannot be combined with {other}")
    if given.keys() >= set(SHAPE):
        keys = ", ".join(SHAPE)
        raise ScenarioError(
            f"model.name: {shown(table.name)} says nothing beside all of {keys}; leave those out"
        )
    _, model = catalogue.find(table.name)
    shape = model.shape.model_dump(exclude_unset=True)
    try:
        read = ModelTable.model_validate({**shape, **given})
    except ValidationError as error:
        raise ScenarioError(line(error.errors(include_url=False), ModelTable)) from None
    return scenario.model_copy(update={"model": read})


NOT_OF_THE_SHAPE = ("attention", "dropout", "fused", "frozen", "lora")
"""Keys of `[model]` about training, which apply to any model."""


def without_shape(table: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of `[model]` about training, which stay if a setting names another model."""
    return {key: value for key, value in table.items() if key in NOT_OF_THE_SHAPE}


def _key(name: str) -> str:
    """Return the form in which names are compared."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
