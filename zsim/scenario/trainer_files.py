"""Scenarios completed from configuration files of trainers, which their runtimes read."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from zsim.config_error import wrong_fields
from zsim.runtimes.lookup import reader_of
from zsim.runtimes.trainer_files.tables import GivenTables, ReadTables, TrainerFileError
from zsim.scenario.model_catalogue import ModelCatalogue
from zsim.scenario.sized_cluster import on_ranks
from zsim.scenario.tables import Scenario, ScenarioError

TABLES = ("model", "parallel", "zero", "activations", "train")
"""Tables that a file may complete."""


def configured(
    scenario: Scenario, text: str, catalogue: ModelCatalogue | None = None, *, key: str
) -> tuple[Scenario, tuple[str, ...]]:
    """Return `scenario` completed from the file that `key` of `[zero]` names, and warnings.

    Shapes of models are those of `catalogue`.

    Raises:
        ModuleNotFoundError: the reader needs a package that is not installed.
        ScenarioError: the file is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    read = reader_of(key)
    known = catalogue or ModelCatalogue(())

    def shape_of(name: str) -> Mapping[str, object]:
        _, model = known.find(name)
        return model.shape.model_dump(exclude_unset=True)

    tables: dict[str, dict[str, Any]] = {
        name: getattr(scenario, name).model_dump(exclude_unset=True) for name in TABLES
    }
    tables["zero"].pop(key, None)
    try:
        found = read(GivenTables(tables=tables, shape_of=shape_of), text)
    except TrainerFileError as error:
        raise ScenarioError(*error.args) from None
    completed = _validated(scenario, found, source=f"zero.{key}")
    is_sized = completed.cluster.nodes is not None or completed.parallel.data is not None
    if found.ranks is not None and not is_sized:
        completed = on_ranks(completed, found.ranks)
    return completed, found.ignored


def _validated(scenario: Scenario, found: ReadTables, *, source: str) -> Scenario:
    """Return `scenario` with the tables of a file; an error names the option of the value.

    Raises:
        ScenarioError: a value is invalid.
    """
    read: dict[str, object] = {}
    wrong: list[str] = []
    for name, table in found.tables.items():
        kind = type(getattr(scenario, name))
        try:
            read[name] = kind.model_validate(table)
        except ValidationError as error:
            for each in wrong_fields(error.errors(include_url=False), kind):
                field = f"{name}.{each.field}"
                option = found.said[field].option if field in found.said else field
                wrong.append(f"{source}: {option}: {each.why}")
    if wrong:
        raise ScenarioError(*wrong)
    return scenario.model_copy(update=read)
