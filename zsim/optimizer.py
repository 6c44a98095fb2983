"""The optimizer that `[train]` of a scenario describes."""

from dataclasses import replace

from zsim.learning_rate import LearningRates
from zsim.rule import LEARNING_RATE, SGD, Adam, Optimizer
from zsim.scenario import ScenarioError, TrainTable

RULE_FIELDS = {
    "adam": ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay"),
    "sgd": ("learning_rate", "weight_decay", "momentum", "nesterov"),
}


def rule_of(train: TrainTable) -> Optimizer:
    """Return the rule; a learning rate that differs from step to step is read from the host.

    Raises:
        ScenarioError: it does not take a constant that is given.
    """
    allowed = RULE_FIELDS[train.optimizer]
    names = dict.fromkeys(name for fields in RULE_FIELDS.values() for name in fields)
    given = {name: value for name in names if (value := getattr(train, name)) is not None}
    for name, value in given.items():
        if name not in allowed:
            raise ScenarioError(
                f"train.{name}: {str(value).lower()} is not for {train.optimizer}, "
                f"which takes {', '.join(allowed)}"
            )
    try:
        rule = Adam(**given) if train.optimizer == "adam" else SGD(**given)
    except ValueError as error:
        raise ScenarioError(f"train.{error}") from None
    return rule if train.learning_rates is None else replace(rule, learning_rate=LEARNING_RATE)


def learning_rates_of(train: TrainTable) -> LearningRates | None:
    """Return the learning rate of each step; nothing if it is constant.

    Raises:
        ScenarioError: they contradict each other.
    """
    if train.learning_rates is None:
        return None
    if train.learning_rate is None:
        raise ScenarioError("train.learning_rate: missing; learning_rates go up to it")
    try:
        return LearningRates(peak=train.learning_rate, **train.learning_rates.model_dump())
    except ValueError as error:
        raise ScenarioError(f"train.learning_rates.{error}") from None
