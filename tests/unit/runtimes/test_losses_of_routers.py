"""Built models with auxiliary losses of routers: sums of loads, scales, and wrong edits of both."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from faults.findings import families
from faults.schedules import edited
from fitting import fitting
from small_mixtures import EXPERTS, FOLDED, MEGATRON, SHAPE, SHARED, model_of, strategy_of

from zsim.model.experts import LoadBalancing
from zsim.model.model import Model, ModelError
from zsim.proof import check, prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllReduce, Copy, Fill, Operation, walk
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim_runtimes.fsdp2.options import FSDP2


@cache
def made(kind: LoadBalancing, precision: Precision = Precision.BF16) -> tuple[Schedule, Model]:
    strategy = strategy_of(MEGATRON, Checkpointing.NONE, precision, **SHARED)
    model = model_of(strategy, replace(EXPERTS, load_balancing_type=kind, z_loss=True))
    return make_schedule(model, strategy), model


def sums(schedule: Schedule) -> list[AllReduce]:
    return [
        each
        for program in schedule.programs
        for each in walk(program.step)
        if isinstance(each, AllReduce) and each.id.endswith("/load/sum")
    ]


@pytest.mark.parametrize("kind", LoadBalancing)
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
        strategy_of(Zero(stage=2), data=2, expert=2, replicate=2),
    ],
)
def test_losses_of_routers_are_proved(kind: LoadBalancing, strategy: Strategy) -> None:
    model = model_of(strategy, replace(EXPERTS, load_balancing_type=kind, z_loss=True))
    assert check(make_schedule(model, strategy), model) == ()


@pytest.mark.parametrize(
    ("kind", "degrees", "group"),
    [
        (LoadBalancing.AUX_LOSS, FOLDED, "tensor"),
        (LoadBalancing.AUX_LOSS, SHARED, "tensor_context"),
        (LoadBalancing.SEQ_AUX_LOSS, {"data": 4, "context": 2, "expert": 2}, "context"),
        (LoadBalancing.GLOBAL_AUX_LOSS, FOLDED, "world"),
        (LoadBalancing.GLOBAL_AUX_LOSS, {"data": 2, "expert": 2, "pipeline": 2}, "tensor_data"),
    ],
)
def test_loads_are_summed_once_a_layer_over_the_groups_of_megatron(
    kind: LoadBalancing, degrees: dict[str, int], group: str
) -> None:
    strategy = strategy_of(**degrees)
    schedule = make_schedule(
        model_of(strategy, replace(EXPERTS, load_balancing_type=kind)), strategy
    )
    found = sums(schedule)
    assert Counter(each.group for each in found) == {group: 2 * 2}  # layers and micro-batches
    assert {(each.target.size, each.wire.value) for each in found} == {(8, "int64")}


def test_a_loss_of_each_sequence_has_loads_of_each() -> None:
    strategy = strategy_of(**FOLDED)
    experts = replace(EXPERTS, load_balancing_type=LoadBalancing.SEQ_AUX_LOSS)
    shape = replace(SHAPE, execution=strategy.execution, experts=experts)
    found = sums(make_schedule(fitting(shape, strategy, sequences=4), strategy))
    assert {each.target.size for each in found} == {4 * 8}


def test_a_recomputed_layer_sums_loads_when_it_is_recomputed_alone() -> None:
    strategy = strategy_of(MEGATRON, Checkpointing.FULL, **FOLDED)
    found = sums(make_schedule(model_of(strategy), strategy))
    assert len(found) == 2 * 2
    assert {each.id.split("/")[1] for each in found} == {"backward"}


def test_losses_of_one_rank_sum_no_loads() -> None:
    strategy = strategy_of(data=4, expert=4)
    assert sums(make_schedule(model_of(strategy), strategy)) == []
    fsdp = strategy_of(Zero(stage=3, emulate=FSDP2()), data=2)
    units = model_of(fsdp).units
    assert all(each.loads is None for unit in units for each in unit.segments)


def test_the_verdict_names_the_tokens_of_the_losses() -> None:
    schedule, model = made(LoadBalancing.GLOBAL_AUX_LOSS)
    shown = prove(schedule, model).values
    assert shown is not None
    assert "auxiliary loss of the batch so far" in shown.routing
    assert "auxiliary loss of the rank" in shown.routing


def changed(name: str, **fields: object) -> Callable[[Operation], Iterable[Operation]]:
    return lambda each: (but(each, **fields),) if each.id == name else (each,)


SUM = "step/forward/mb1/block1/forward7/load/sum"
SEED = "step/backward/mb1/block0/backward7/seed"
Z_SEED = "step/backward/mb0/block1/backward8/seed"


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        (LoadBalancing.AUX_LOSS, ("tensor", "context", "world", "expert", "tensor_expert")),
        (LoadBalancing.GLOBAL_AUX_LOSS, ("tensor", "context", "tensor_context", "data")),
    ],
)
def test_loads_that_are_summed_over_other_ranks_are_found(
    kind: LoadBalancing, groups: tuple[str, ...]
) -> None:
    schedule, model = made(kind)
    assert SUM in {each.id for each in sums(schedule)}
    known = {each.name for each in schedule.groups}
    for group in set(groups) & known:
        assert "values" in families(edited(schedule, changed(SUM, group=group)), model), group
    assert "values" in families(
        edited(schedule, lambda each: () if each.id == SUM else (each,)), model
    )


def test_loads_that_are_summed_twice_are_found() -> None:
    schedule, model = made(LoadBalancing.AUX_LOSS)
    (one,) = (each for each in sums(schedule) if each.id == SUM)
    twice = edited(
        schedule, lambda each: (each, but(one, id=f"{SUM}/2")) if each.id == SUM else (each,)
    )
    assert "values" in families(twice, model)


@pytest.mark.parametrize("kind", [LoadBalancing.AUX_LOSS, LoadBalancing.GLOBAL_AUX_LOSS])
@pytest.mark.parametrize("seed", [SEED, Z_SEED])
def test_losses_of_routers_with_another_scale_are_found(kind: LoadBalancing, seed: str) -> None:
    schedule, model = made(kind, Precision.FP16)
    fills = {each.id: each for each in walk(schedule.programs[0].step) if isinstance(each, Fill)}
    assert fills[seed].scalar is not None
    for fields in ({"value": 0.0}, {"value": 2.0}, {"value": 0.25}, {"scalar": None}):
        assert "values" in families(edited(schedule, changed(seed, **fields)), model), fields


@pytest.mark.parametrize(
    "name", ["step/forward/mb0/block1/forward7/load/count", SUM.replace("sum", "count")]
)
def test_a_global_loss_that_leaves_out_a_micro_batch_is_found(name: str) -> None:
    schedule, model = made(LoadBalancing.GLOBAL_AUX_LOSS)
    (count,) = (each for each in walk(schedule.programs[0].step) if each.id == name)
    assert isinstance(count, Copy)
    other = edited(schedule, changed(name, accumulate=not count.accumulate))
    assert families(other, model)
    assert "values" in families(
        edited(schedule, lambda each: () if each.id == SUM.replace("sum", "so_far") else (each,)),
        model,
    )


def test_a_global_loss_of_a_runtime_whose_ranks_sum_no_loads_is_refused() -> None:
    strategy = strategy_of(Zero(stage=3, emulate=FSDP2()), data=2)
    experts = replace(EXPERTS, load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS)
    with pytest.raises(ModelError) as caught:
        model_of(strategy, experts)
    assert str(caught.value) == (
        "model.experts.load_balancing_type: global_aux_loss is not modelled for this runtime, "
        "whose ranks sum no loads; say aux_loss"
    )
