"""Required keys of a scenario: one error lists all that are missing."""

from collections.abc import Iterator

from zsim.scenario.tables import Scenario, ScenarioError

SHAPE = ("layers", "hidden_size", "attention_heads", "sequence_length", "vocab_size")
"""Keys that define a model that is not read from a file."""

BATCHES = ("micro_batch_size", "gradient_accumulation_steps")


def need_keys(scenario: Scenario) -> None:
    """Raise ScenarioError unless `scenario` has every required key.

    Raises:
        ScenarioError: keys are missing; the line names each, and its alternatives.
    """
    _need_none([*_of_cluster(scenario), *_of_model(scenario), *_of_batches(scenario)])


def need_cluster_keys(scenario: Scenario) -> None:
    """Raise ScenarioError unless `scenario` has the keys that its cluster needs.

    Raises:
        ScenarioError: as `need_keys`.
    """
    _need_none([*_of_cluster(scenario)])


Missing = tuple[list[str], str]
"""Keys, and their alternatives."""


def _need_none(missing: list[Missing]) -> None:
    told = [f"{', '.join(keys)}: missing; {why}" for keys, why in missing]
    if told:
        raise ScenarioError("; also ".join(told))


def _of_cluster(scenario: Scenario) -> Iterator[Missing]:
    cluster = scenario.cluster
    if cluster.topology is None and cluster.node is None and cluster.fabric is None:
        yield ["cluster.topology"], "give it, or node and fabric"
    if cluster.nodes is None and scenario.parallel.data is None:
        yield ["cluster.nodes"], "give it, or parallel.data"


def _of_model(scenario: Scenario) -> Iterator[Missing]:
    model, zero = scenario.model, scenario.zero
    if zero.stage is None and zero.emulate is None:
        yield ["zero.stage"], "must be 0, 1, 2, 3"
    if model.name is None and model.hf_config is None and model.parameters is None:
        shape = [f"model.{name}" for name in SHAPE if getattr(model, name) is None]
        if shape:
            yield (
                shape,
                f"a model has {', '.join(SHAPE)}, or name, or hf_config, or parameters alone",
            )


def _of_batches(scenario: Scenario) -> Iterator[Missing]:
    train = scenario.train
    given = [name for name in BATCHES if getattr(train, name) is not None]
    if train.global_batch_size is not None and not given:
        yield (
            ["train.micro_batch_size"],
            "give it or gradient_accumulation_steps beside global_batch_size",
        )
    elif train.global_batch_size is None and len(given) < len(BATCHES):
        keys = [f"train.{name}" for name in BATCHES if name not in given]
        yield keys, f"give two of {', '.join(BATCHES)}, global_batch_size"
