"""Scenarios completed from configuration files of trainers, which their runtimes read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from zsim.config_error import wrong_fields
from zsim.runtimes.lookup import reader_of
from zsim.runtimes.trainer_files.tables import GivenTables, ReadTables, TrainerFileError
from zsim.scenario.model_catalogue import ModelCatalogue
from zsim.scenario.sized_cluster import Topology, on_ranks, placed
from zsim.scenario.tables import Scenario, ScenarioError

TABLES = ("model", "parallel", "zero", "activations", "train")
"""Tables that a file may complete."""


class Completed(NamedTuple):
    """A scenario completed from a file of a trainer.

    Attributes:
        scenario: the completed scenario.
        ignored: options that zsim does not follow, each with the difference.
        assumed: values that neither the file nor the scenario gives, each with its source.
        machines: number of machines that the file gives; None if the scenario sizes the cluster.
    """

    scenario: Scenario
    ignored: tuple[str, ...]
    assumed: tuple[str, ...]
    machines: int | None


def configured(
    scenario: Scenario, text: str, catalogue: ModelCatalogue | None = None, *, key: str
) -> Completed:
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
    is_sized = scenario.cluster.nodes is not None or scenario.parallel.data is not None
    given = GivenTables(
        tables=tables, shape_of=shape_of, is_sized=is_sized, nodes=scenario.cluster.nodes
    )
    try:
        found = read(given, text)
    except TrainerFileError as error:
        raise ScenarioError(*error.args) from None
    completed = _validated(scenario, found, source=f"zero.{key}")
    machines = None
    if found.ranks is not None and not is_sized:
        if completed.parallel.data is None:
            completed = on_ranks(completed, found.ranks)
        machines = found.machines
    return Completed(completed, found.ignored, found.assumed, machines)


def need_machines(completed: Completed, topology: Topology, *, key: str) -> None:
    """Raise ScenarioError unless a node of the cluster holds the ranks of a machine of the file.

    Raises:
        ScenarioError: nodes have more or fewer GPUs than machines have ranks.
    """
    machines = completed.machines
    if machines is None:
        return
    scenario = completed.scenario
    cluster, _ = placed(scenario, topology)
    parallel = scenario.parallel
    ranks = parallel.replicate * (parallel.data or 1) * parallel.tensor * parallel.pipeline
    each = cluster.gpus_per_node
    fits = ranks <= each if machines == 1 else ranks == machines * each
    if not fits:
        raise ScenarioError(
            f"zero.{key}: {ranks} processes on {machines} machine{'s' * (machines > 1)} do not fit "
            f"nodes of {each} GPUs ({cluster.name}); give cluster.nodes or parallel.data, or "
            "another cluster.node"
        )


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
                option = found.origins[field].option if field in found.origins else field
                wrong.append(f"{source}: {option}: {each.why}")
    if wrong:
        raise ScenarioError(*wrong)
    return scenario.model_copy(update=read)
