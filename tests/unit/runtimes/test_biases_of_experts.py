"""Built models with biases of experts: loads of a step, their sum, the update, and wrong edits."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from faults.findings import families
from faults.schedules import edited
from small_mixtures import EXPERTS, FOLDED, MEGATRON, SHAPE, SHARED, model_of, strategy_of

from zsim.model.model import Model, ModelError
from zsim.proof import check, prove
from zsim.proof.execution.fewer_micro_batches import with_fewer
from zsim.proof.execution.inferred_model import training_of
from zsim.proof.execution.rows_as_places import in_places
from zsim.runtimes.registry import make_schedule
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import Action, AllReduce, Compute, Copy, Operation, walk
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.specification.row_kinds import RowKinds
from zsim.strategy.activations import Checkpointing
from zsim.strategy.optimizer_rule import SGD, ExpertBias, rules
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim_runtimes.fsdp2.options import FSDP2

BIASED = replace(EXPERTS, score_bias=True)


@cache
def made(precision: Precision = Precision.BF16) -> tuple[Schedule, Model]:
    strategy = strategy_of(MEGATRON, Checkpointing.NONE, precision, **FOLDED)
    model = model_of(strategy, BIASED)
    return make_schedule(model, strategy), model


@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(**FOLDED),
        strategy_of(**SHARED),
        strategy_of(data=4),
        strategy_of(data=4, expert=2, pipeline=2),
        strategy_of(MEGATRON, Checkpointing.FULL, **FOLDED),
        strategy_of(MEGATRON, Checkpointing.NONE, Precision.FP16, data=2, expert=2),
        strategy_of(Zero(stage=3, sequence_parallel=True), **FOLDED),
        strategy_of(Zero(stage=2), Checkpointing.FULL, data=2, expert=2, replicate=2),
    ],
)
def test_biases_of_experts_are_proved(strategy: Strategy) -> None:
    model = model_of(strategy, BIASED)
    assert len(model.biases) == 2
    schedule = make_schedule(model, strategy)
    assert check(schedule, model) == ()
    found = prove(schedule, model).values
    assert found is not None
    assert "biases of experts by the load of the step" in found.routing


def test_a_bias_is_no_parameter_of_buckets_and_counts() -> None:
    strategy = strategy_of(**FOLDED)
    model, plain = model_of(strategy, BIASED), model_of(strategy)
    assert model.parameter_count == plain.parameter_count
    assert [each.name for each in model.parameters] == [each.name for each in plain.parameters]
    assert {(each.name, each.shape, each.load) for each in model.biases} == {
        (f"block{layer}.router.score_bias", (8,), f"block{layer}/experts/load")
        for layer in range(2)
    }


def test_loads_of_all_layers_are_summed_once_a_step_over_all_ranks_of_a_stage() -> None:
    schedule, _ = made()
    found = [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, AllReduce) and each.id.startswith("step/balance")
    ]
    assert [(each.group, each.target.size, each.wire.value) for each in found] == [
        ("world", 2 * 8, "fp32")
    ]
    staged = strategy_of(data=4, expert=2, pipeline=2)
    for program in make_schedule(model_of(staged, BIASED), staged).programs:
        sums = [each for each in walk(program.step) if each.id == "step/balance/sum"]
        assert [(each.group, each.target.size) for each in sums if isinstance(each, AllReduce)] == [
            ("tensor_data", 8)
        ]


def test_a_recomputed_router_counts_its_rows_once() -> None:
    strategy = strategy_of(MEGATRON, Checkpointing.FULL, **FOLDED)
    schedule = make_schedule(model_of(strategy, BIASED), strategy)
    counts = [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Copy) and each.accumulate and each.target.buffer.endswith("bias/load")
    ]
    assert len(counts) == 2 * 2  # layers and micro-batches
    assert {each.id.split("/")[1] for each in counts} == {"backward"}


def test_a_runtime_without_loads_of_several_ranks_has_no_biases() -> None:
    strategy = strategy_of(Zero(stage=3, emulate=FSDP2()), data=2)
    assert model_of(strategy, BIASED).biases == ()


def test_steps_with_biases_are_proved_by_few_micro_batches() -> None:
    strategy = strategy_of(data=2, expert=2).but({"train.gradient_accumulation_steps": 16})
    model = model_of(strategy, BIASED)
    schedule = make_schedule(model, strategy)
    training = training_of(schedule)
    assert training is not None
    assert with_fewer(in_places(schedule, RowKinds()), training) is not None
    assert check(schedule, model) == ()


def without(name: str) -> Callable[[Operation], Iterable[Operation]]:
    return lambda each: () if each.id == name else (each,)


def test_a_rank_that_forgets_the_rows_of_a_micro_batch_in_many_is_found() -> None:
    strategy = strategy_of(data=2, expert=2).but({"train.gradient_accumulation_steps": 16})
    model = model_of(strategy, BIASED)
    schedule = make_schedule(model, strategy)
    for batch in (0, 7, 15):
        name = f"step/forward/mb{batch}/block1/forward1/load/block1.router.score_bias"
        faulty = edited(schedule, without(name))
        assert faulty != schedule
        assert "values" in families(faulty, model)


def changed(name: str, **fields: object) -> Callable[[Operation], Iterable[Operation]]:
    return lambda each: (but(each, **fields),) if each.id == name else (each,)


SUM = "step/balance/sum"
COUNT = "step/forward/mb1/block0/forward4/load/block0.router.score_bias"
UPDATE = "step/balance/block1.router.score_bias/update"


@pytest.mark.parametrize("group", ["tensor", "data", "expert", "expert_data", "tensor_expert"])
def test_loads_that_are_summed_over_some_ranks_are_found(group: str) -> None:
    schedule, model = made()
    assert "values" in families(edited(schedule, changed(SUM, group=group)), model)


@pytest.mark.parametrize("name", [SUM, COUNT, UPDATE])
def test_a_step_of_a_bias_that_is_left_out_is_found(name: str) -> None:
    schedule, model = made()
    left = edited(schedule, without(name))
    assert left != schedule
    assert "values" in families(left, model)


@pytest.mark.parametrize(
    "fields", [{"accumulate": False}, {"divisor": 2}], ids=["last one alone", "half of each"]
)
def test_loads_that_are_not_the_sum_of_micro_batches_are_found(fields: dict[str, object]) -> None:
    schedule, model = made()
    assert "values" in families(edited(schedule, changed(COUNT, **fields)), model)


def test_loads_that_are_not_set_to_zero_are_found() -> None:
    schedule, model = made()
    name = "step/balance/block0.router.score_bias/zero"
    left = edited(schedule, without(name))
    assert families(left, model)


def test_a_bias_that_follows_the_load_of_another_layer_is_found() -> None:
    schedule, model = made()
    by_id = {each.id: each for each in walk(schedule.programs[0].step)}
    one, other = (by_id[f"step/balance/block{layer}.router.score_bias/update"] for layer in (0, 1))
    assert isinstance(one, Compute)
    assert isinstance(other, Compute)
    swapped = (one.operands[0], other.operands[1])
    assert "values" in families(edited(schedule, changed(one.id, operands=swapped)), model)


def test_a_bias_with_another_rule_is_found() -> None:
    schedule, model = made()
    rule = SGD(learning_rate=1e-3)
    assert "values" in families(edited(schedule, changed(UPDATE, rule=rule)), model)


def test_a_bias_that_counts_rows_of_an_exchange_is_found() -> None:
    schedule, model = made()
    by_id = {each.id: each for each in walk(schedule.programs[0].step)}
    count = by_id[COUNT]
    assert isinstance(count, Copy)
    other = but(count.source, buffer="block0/experts/counts")
    assert "values" in families(edited(schedule, changed(COUNT, source=other)), model)


def test_biases_are_updated_in_a_step_that_overflows_too() -> None:
    schedule, model = made(Precision.FP16)
    outside = {each.id for each in schedule.programs[0].step}
    assert {SUM, UPDATE} <= outside
    assert check(schedule, model) == ()


def test_a_schedule_with_biases_is_read_from_its_file() -> None:
    schedule, model = made()
    again = decode_value(encode_value(schedule, Schedule), Schedule)
    assert again == schedule
    assert isinstance(again, Schedule)
    assert check(again, model) == ()


def test_the_rule_of_biases_has_no_name_in_a_scenario_and_moves_towards_the_mean() -> None:
    torch = pytest.importorskip("torch")
    assert ExpertBias not in rules().values()
    bias, load = torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 2.0])
    ExpertBias().update(load, bias, [], rate=1e-3, step=1.0)
    assert bias.tolist() == pytest.approx([1e-3, 0.0, -1e-3, 0.0])


def test_a_bias_that_several_layers_share_is_refused() -> None:
    strategy = strategy_of(data=2, expert=2)
    model = model_of(strategy, BIASED)
    shared = model.biases[0]
    units = tuple(
        replace(unit, biases=(replace(unit.biases[0], name=shared.name),)) if unit.biases else unit
        for unit in model.units
    )
    with pytest.raises(ModelError):
        replace(model, units=units)
    assert SHAPE.layers == 2


def test_updates_of_biases_are_the_only_ones_of_their_rule() -> None:
    schedule, _ = made()
    found = [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Compute) and each.action is Action.UPDATE
    ]
    assert {each.id for each in found if isinstance(each.rule, ExpertBias)} == {
        f"step/balance/block{layer}.router.score_bias/update" for layer in range(2)
    }


def test_the_verdict_does_not_count_biases_as_frozen_parameters_or_groups() -> None:
    schedule, model = made()
    (values,) = (each for each in prove(schedule, model).proved if each.startswith("values"))
    assert "frozen" not in values
    assert "groups" not in values
    assert "ExpertBias" not in values
