"""The optimizer that `[train]` of a scenario describes."""

from dataclasses import replace

from zsim.config_error import shown
from zsim.scenario.tables import RuleTable, ScenarioError, TrainTable
from zsim.strategy.learning_rate import LearningRates
from zsim.strategy.optimizer_rule import (
    LEARNING_RATE,
    Optimizer,
    ParameterGroup,
    constants_of,
    rules,
)


def rule_of(train: TrainTable) -> Optimizer:
    """Return the rule; a learning rate that differs between steps is read from the host.

    Raises:
        ScenarioError: the rule does not have a constant that is given.
    """
    rule = _changed(rules()[train.optimizer](), train, train.optimizer, "train")
    return rule if train.learning_rates is None else replace(rule, learning_rate=LEARNING_RATE)


def groups_of(train: TrainTable) -> tuple[ParameterGroup, ...]:
    """Return the groups of parameters with separate constants; others use those of `[train]`.

    Raises:
        ScenarioError: the rule of a group does not have a constant that is given.
    """
    default, found = rule_of(train), list[ParameterGroup]()
    for number, group in enumerate(train.group):
        where = f"train.group.{number}"
        if group.learning_rate is not None and train.learning_rates is not None:
            rate = group.learning_rate
            raise ScenarioError(f"{where}.learning_rate: {rate} stands beside learning_rates")
        rule = _changed(default, group, train.optimizer, where)
        if rule.states != default.states:
            kept, wanted = (", ".join(each.states) or "no states" for each in (rule, default))
            raise ScenarioError(
                f"{where}: keeps {kept}, must keep {wanted} as {train.optimizer} does"
            )
        found.append(ParameterGroup(parameters=group.parameters, rule=rule))
    return tuple(found)


def learning_rates_of(train: TrainTable) -> dict[str, object] | None:
    """Return the fields of the learning rates by step; None if the rate is constant.

    Raises:
        ScenarioError: their peak is missing.
    """
    if train.learning_rates is None:
        return None
    if train.learning_rate is None:
        raise ScenarioError("train.learning_rate: missing; learning_rates go up to it")
    return {"peak": train.learning_rate, **train.learning_rates.given(LearningRates)}


def _changed(rule: Optimizer, table: RuleTable, kind: str, where: str) -> Optimizer:
    """Return `rule` with the constants that a table gives."""
    names, own = RuleTable.model_fields, constants_of(rule)
    given = {name: value for name in names if (value := getattr(table, name)) is not None}
    wrong = [
        f"{where}.{name}: {shown(value)} is not for {kind}, which takes {', '.join(own)}"
        for name, value in given.items()
        if name not in own
    ]
    if wrong:
        raise ScenarioError(*wrong)
    try:
        return replace(rule, **given)
    except ValueError as error:
        raise ScenarioError(f"{where}.{error}") from None
