"""Built models with a capacity: rules of dropping are proved, and other rules are found."""

from dataclasses import replace
from functools import cache

import pytest
from faults.findings import families
from small_mixtures import EXPERTS, FOLDED, MEGATRON, model_of, strategy_of

from zsim.model.architecture_error import ArchitectureError
from zsim.model.experts import DropRule, Drops, Experts
from zsim.model.model import Model
from zsim.proof import check, prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy

LIMITED = replace(EXPERTS, capacity_factor=1.25)
RULES = [
    LIMITED,
    replace(LIMITED, drop_policy=DropRule.POSITION, score_bias=True),
    replace(LIMITED, pads_to_capacity=True),
]


@pytest.mark.parametrize("experts", RULES)
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(data=4, expert=4),
        strategy_of(**FOLDED),
        strategy_of(MEGATRON, Checkpointing.FULL, data=4, expert=2),
        strategy_of(data=4, expert=2, pipeline=2),
    ],
)
def test_rules_of_dropping_are_proved_and_named(strategy: Strategy, experts: Experts) -> None:
    model = model_of(strategy, experts)
    schedule = make_schedule(model, strategy)
    assert check(schedule, model) == ()
    found = prove(schedule, model).values
    assert found is not None
    tokens = 16 // strategy.parallel.tensor
    assert f"rows {experts.drops(tokens)} dropped" in found.routing


@cache
def made(rule: DropRule) -> tuple[Schedule, Model]:
    strategy = strategy_of(data=4, expert=4)
    model = model_of(strategy, replace(LIMITED, drop_policy=rule))
    return make_schedule(model, strategy), model


@pytest.mark.parametrize("rule", DropRule)
def test_a_schedule_that_drops_by_another_rule_than_its_model_is_found(rule: DropRule) -> None:
    schedule, model = made(rule)
    (count,) = schedule.counts
    assert count.drops == Drops(capacity=5, by=rule)
    (other,) = set(DropRule) - {rule}
    for drops in (
        None,
        Drops(capacity=6, by=rule),
        Drops(capacity=4, by=rule),
        Drops(capacity=5, by=other),
    ):
        changed = replace(schedule, counts=(replace(count, drops=drops),))
        assert "values" in families(changed, model), drops


def test_a_model_without_a_capacity_drops_no_rows() -> None:
    strategy = strategy_of(data=4, expert=4)
    model = model_of(strategy)
    assert all(each.drops is None for unit in model.units for each in unit.segments)
    (count,) = make_schedule(model, strategy).counts
    assert count.drops is None


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"drop_policy": DropRule.POSITION},
            "model.experts.drop_policy: position needs capacity_factor",
        ),
        (
            {"capacity_factor": 0.9},
            "model.experts.capacity_factor: 0.9 must be from 1, the mean, to 8, the experts",
        ),
    ],
)
def test_a_rule_without_a_capacity_is_refused(fields: dict[str, object], line: str) -> None:
    with pytest.raises(ArchitectureError) as caught:
        replace(EXPERTS, **fields)  # type: ignore[arg-type]  # fields of any type
    assert str(caught.value) == line
