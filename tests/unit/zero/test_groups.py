"""Groups of parameters are updated by rules of their own, in every stage and runtime."""

from dataclasses import replace

import pytest
from emulated_strategies import EMULATED
from emulated_strategies import strategy as emulating
from exact_training import STEPS, trained
from faults.cases import model_of
from faults.schedules import changed
from faults.selections import updates

from zsim.analysis.schedule_plan import plan
from zsim.closed_form.states import persistent_bytes
from zsim.config_error import ConfigError
from zsim.model.model import Model, ModelError
from zsim.proof import check, prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, Role
from zsim.schedule.schedule import Kind, Scalar, Schedule, ScheduleError
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, Optimizer, ParameterGroup
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des.values import train

DECAY = Adam(learning_rate=0.01, epsilon=1e-5, weight_decay=0.125)
NONE = replace(DECAY, weight_decay=0.0)
GROUPS = (ParameterGroup(parameters=("*.ln*",), rule=NONE),)
OWN = {
    f"stage {stage}": Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=stage, bucket_elements=60),
        train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
    )
    for stage in range(4)
}
RUNTIMES = {
    name: emulating(named, data=4, micro_batches=2, precision=Precision.BF16, clip_norm=1.0)
    for name, named in EMULATED.items()
}
ALL = {
    name: each.but({"train.optimizer": DECAY, "train.groups": GROUPS})
    for name, each in (OWN | RUNTIMES).items()
    if each is not None
}


def made_of(strategy: Strategy) -> tuple[Schedule, Model]:
    model = model_of(strategy)
    return make_schedule(model, strategy), model


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", ALL)
def test_every_runtime_trains_each_group_by_its_rule(name: str) -> None:
    made, model = made_of(ALL[name])
    assert check(made, model) == ()
    result = trained(made, model, train(model, ALL[name], STEPS), None)
    assert result.is_right, result


def test_rules_of_a_contract_without_a_strategy_are_proved_and_said() -> None:
    made, model = made_of(ALL["stage 3"])
    bare = replace(made, contract=replace(made.contract, strategy=None, peak_bytes=()))
    shown = prove(bare, model).values
    assert shown is not None
    assert not shown.findings
    assert all("rule" not in each for each in shown.assumed), shown.assumed
    kept = [each for each in updates(bare) if each.rule == DECAY]
    wrong = changed(bare, kept[0].id, rule=NONE)
    assert [each.invariant for each in check(wrong, model)] == ["values"]


def test_a_proof_says_how_many_rules_there_are() -> None:
    proved = prove(*made_of(ALL["stage 1"])).proved
    assert any("Adam 0.01 in 2 groups as the contract says" in each for each in proved)


def updated(made: Schedule) -> dict[Optimizer, int]:
    """Elements that each rule updates, over the ranks of the data axis and with padding."""
    found: dict[Optimizer, int] = {}
    for rank in range(made.mesh.size):
        for each in made.program_of(rank).by_id.values():
            if isinstance(each, Compute) and each.action is Action.UPDATE:
                assert isinstance(each.rule, Optimizer)
                size = made.extent(each.operands[0].view, made.mesh.coordinates(rank))[1]
                found[each.rule] = found.get(each.rule, 0) + size
    return found


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "deepspeed 1", "deepspeed 3", "stage 2"])
def test_every_element_is_updated_once_and_by_one_rule(name: str) -> None:
    plain, _ = made_of(ALL[name].but({"train.groups": ()}))
    made, model = made_of(ALL[name])
    (whole,) = updated(plain).values()
    found = updated(made)
    norms = sum(each.elements for each in model.parameters if ".ln" in each.name)
    assert found[NONE] >= norms
    assert found[DECAY] >= model.parameter_count - norms
    padding = sum(found.values()) - model.parameter_count
    assert 0 <= padding <= 4 * len(model.parameters) * 8
    if name != "deepspeed 1":  # which pads each group
        assert sum(found.values()) == whole


@pytest.mark.parametrize("optimizer", [SGD(), SGD(momentum=0.5), DECAY])
@pytest.mark.parametrize("stage", range(4))
def test_moments_are_as_many_bytes_as_the_rule_keeps(stage: int, optimizer: Optimizer) -> None:
    strategy = ALL[f"stage {stage}"].but({"train.optimizer": optimizer, "train.groups": ()})
    made, model = made_of(strategy)
    states = persistent_bytes(model, strategy)
    assert states is not None
    (program,) = made.programs
    moments = sum(
        program.by_name[name].size_bytes
        for name in program.persistent
        if program.by_name[name].kind is Kind.MOMENT
    )
    masters = states[Kind.MASTER]
    assert states[Kind.MOMENT] == moments == masters * optimizer.moments
    assert plan(made, model).model_state_bytes >= moments


def test_moments_of_a_group_are_parts_of_those_of_all() -> None:
    grouped, plain = (made_of(each)[0] for each in (ALL["stage 3"], OWN["stage 3"]))
    assert grouped.programs[0].buffers == plain.programs[0].buffers
    for each in grouped.programs[0].by_id.values():
        if isinstance(each, Compute) and each.action is Action.UPDATE:
            views = {each.view.buffer for each in each.operands if each.role is Role.MOMENT}
            assert len(views) == 2


def test_a_pattern_that_no_parameter_has_is_refused() -> None:
    group = ParameterGroup(parameters=("*.norm",), rule=NONE)
    strategy = ALL["stage 1"].but({"train.groups": (group,)})
    with pytest.raises(ModelError, match=r"train.group: '\*.norm' is no parameter; there are emb"):
        make_schedule(model_of(strategy), strategy)


def test_a_group_with_other_moments_than_the_optimizer_is_refused() -> None:
    group = ParameterGroup(parameters=("*",), rule=SGD())
    with pytest.raises(ConfigError, match="keeps other moments than the optimizer"):
        ALL["stage 1"].but({"train.groups": (group,)})


def test_a_contract_with_a_learning_rate_that_nobody_gives_is_refused() -> None:
    given = ALL["stage 1"].but({"train.optimizer": replace(DECAY, learning_rate=LEARNING_RATE)})
    made, _ = made_of(given)
    kept = tuple(Scalar(name=each.name, initial=each.initial) for each in made.scalars)
    with pytest.raises(ScheduleError, match="learning_rate' is no scalar that is given"):
        replace(made, scalars=kept)
