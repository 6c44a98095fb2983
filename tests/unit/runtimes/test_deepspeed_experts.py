"""DeepSpeed's layers of experts: states, sums of gradients, exchanges, and what it refuses."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from faults.findings import families
from faults.schedules import edited
from fitting import fitting

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import Llama
from zsim.model.experts import Experts
from zsim.model.kernel import KernelKind
from zsim.model.model import Model, ModelError, Parameter
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllReduce, AllToAll, Operation, ReadCounts, walk
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed import expert_layers
from zsim_runtimes.deepspeed.options import DeepSpeed, ExpertLayer, OffloadDevice, OffloadOptimizer

EXPERTS = Experts(
    count=8,
    top_k=2,
    intermediate_size=6,
    shared_intermediate_size=4,
    capacity_factor=1.25,
    pads_to_capacity=True,
)
SHAPE = Llama(layers=2, hidden_size=8, attention_heads=2, sequence_length=16, vocab_size=6)


NATIVE = DeepSpeed(expert_layer=ExpertLayer.NATIVE)
AUTO_EP = DeepSpeed(reduce_bucket_size=200)
DROPLESS = replace(EXPERTS, capacity_factor=None, pads_to_capacity=False)


def strategy_of(
    stage: int,
    options: DeepSpeed | None = None,
    precision: Precision = Precision.BF16,
    /,
    **degrees: int,
) -> Strategy:
    return Strategy(
        parallel=Parallel.of(degrees or {"data": 4, "expert": 2}),
        zero=Zero(stage=stage, emulate=options or NATIVE),
        train=Train(gradient_accumulation_steps=2, precision=precision, clip_norm=1.0),
    )


def model_of(strategy: Strategy, experts: Experts = EXPERTS) -> Model:
    return fitting(replace(SHAPE, execution=strategy.execution, experts=experts), strategy)


SMALL = NATIVE.but(reduce_bucket_size=200)


@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(1),
        strategy_of(2),
        strategy_of(2, NATIVE, data=4, expert=4),
        strategy_of(2, SMALL),
        strategy_of(1, SMALL.but(overlap_comm=True)),
        strategy_of(2, NATIVE.but(overlap_comm=True, communication_data_type=DType.FP32)),
        strategy_of(2, SMALL, Precision.FP16),
        strategy_of(1).but({"activations.checkpointing": Checkpointing.FULL}),
        strategy_of(2).but({"train.compile": True}),
    ],
)
def test_expert_layers_are_proved(strategy: Strategy) -> None:
    model = model_of(strategy)
    assert check(make_schedule(model, strategy), model) == ()


@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(1, AUTO_EP),
        strategy_of(2, AUTO_EP, data=4, expert=4),
        strategy_of(2, DeepSpeed(overlap_comm=True), Precision.FP16),
        strategy_of(2, AUTO_EP).but({"train.compile": True}),
        strategy_of(1, AUTO_EP).but({"activations.checkpointing": Checkpointing.FULL}),
    ],
)
def test_auto_ep_is_proved_and_reads_counts(strategy: Strategy) -> None:
    model = model_of(strategy, DROPLESS)
    schedule = make_schedule(model, strategy)
    assert check(schedule, model) == ()
    operations = [*walk(schedule.programs[0].step)]
    waits = [each for each in operations if isinstance(each, ReadCounts)]
    assert len(waits) == 2 * 2  # layers and micro-batches
    found = [kernel for segment in model.units[1].segments for kernel in segment.forward]
    grouped = [each for each in found if each.kind is KernelKind.GROUPED_MATMUL]
    assert len(grouped) == 3  # w1, w3 and w2


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_of_experts_are_split_at_a_size(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_layers, "GROUP_ELEMENTS", 600)
    monkeypatch.setattr("zsim_runtimes.deepspeed.stage_1_2_volume.GROUP_ELEMENTS", 600)
    strategy = strategy_of(stage)
    model = model_of(strategy)
    groups = expert_layers.trained_groups(model, strategy)
    assert sorted(each.name for group in groups for each in group) == sorted(
        each.name for each in model.parameters
    )

    def elements(group: list[Parameter]) -> int:
        return sum(each.elements for each in group)

    experts = [group for group in groups if group[0].expert]
    assert len(experts) > 1
    assert all(len(group) == 1 or elements(group) <= 600 for group in experts)
    assert check(make_schedule(model, strategy), model) == ()


def test_a_rank_keeps_states_of_experts_that_its_expert_data_ranks_share() -> None:
    strategy = strategy_of(1, NATIVE, data=8, expert=4)
    model = model_of(strategy)
    experts = sum(each.elements for each in model.parameters if each.expert)
    (program,) = make_schedule(model, strategy).programs
    masters = [
        buffer.elements
        for buffer in program.buffers
        if buffer.name in program.persistent and buffer.kind is Kind.MASTER
        if buffer.shard == "expert_data"
    ]
    assert masters == [experts // 2]


def test_exchanges_have_equal_blocks_and_the_host_waits_for_none() -> None:
    strategy = strategy_of(2)
    schedule = make_schedule(model_of(strategy), strategy)
    operations = [*walk(schedule.programs[0].step)]
    assert not any(isinstance(each, ReadCounts) for each in operations)
    exchanges = [each for each in operations if isinstance(each, AllToAll)]
    assert len(exchanges) == 2 * 2 * 4  # layers, micro-batches, and there and back both ways
    capacity = 5  # 16 x 2 / 8 x 1.25 copies of each expert
    assert {each.source.size for each in exchanges} == {8 * capacity * SHAPE.hidden_size}


def test_experts_run_one_after_the_other() -> None:
    strategy = strategy_of(2)
    found = [
        kernel
        for unit in model_of(strategy).units
        for segment in unit.segments
        for kernel in segment.forward
    ]
    assert not any(each.kind is KernelKind.GROUPED_MATMUL for each in found)
    rows = 2 * 5  # from two ranks
    products = [each for each in found if each.kind is KernelKind.MATMUL and rows in each.shape]
    assert len(products) == SHAPE.layers * 4 * 3  # experts of a rank; gate, up and down


def changed(schedule: Schedule, **fields: object) -> Schedule:
    """Return the schedule with other fields of the first reduction of experts."""
    (first, *_) = (
        each.id
        for each in walk(schedule.programs[0].step)
        if isinstance(each, AllReduce) and each.group == "expert_data"
    )

    def change(each: Operation) -> Iterable[Operation]:
        return (but(each, **fields) if each.id == first else each,)

    return edited(schedule, change)


@pytest.mark.parametrize("group", ["data", "expert"])
def test_gradients_of_experts_that_are_summed_over_another_group_are_found(group: str) -> None:
    strategy = strategy_of(1)
    model = model_of(strategy)
    schedule = make_schedule(model, strategy)
    assert "values" in families(changed(schedule, group=group), model)


def test_a_bucket_with_both_kinds_has_a_reduction_for_each_group() -> None:
    strategy = strategy_of(2)
    (program,) = make_schedule(model_of(strategy), strategy).programs
    groups = [
        each.group
        for each in walk(program.step)
        if isinstance(each, AllReduce) and each.source.size > 1
    ]
    assert sorted(groups) == ["data", "data", "expert_data", "expert_data"]  # micro-batches


@pytest.mark.parametrize(
    ("strategy", "experts", "why"),
    [
        (strategy_of(3), EXPERTS, r"parallel\.expert: 2 with zero\.stage 3: native DeepSpeed MoE"),
        (strategy_of(3, AUTO_EP), DROPLESS, r"2 with zero\.stage 3 is not modelled; use 1 or 2"),
        (strategy_of(2, AUTO_EP), EXPERTS, r"capacity_factor: 1\.25 is not in AutoEP, which drops"),
        (
            strategy_of(2, AUTO_EP),
            replace(DROPLESS, bias=True),
            r"model\.experts\.bias: true is not in AutoEP",
        ),
        (strategy_of(0), EXPERTS, r"parallel\.expert: 2 with zero\.stage 0 is not modelled"),
        (
            strategy_of(2),
            replace(EXPERTS, pads_to_capacity=False),
            r"model\.experts\.pads_to_capacity: must be true, with a capacity_factor, for 2 native",
        ),
        (
            strategy_of(2),
            replace(EXPERTS, top_k=1, capacity_factor=1.0),
            r"capacity_factor: 1 is 2 copies for an expert, must be at least DeepSpeed's min_cap",
        ),
        (
            strategy_of(2, DeepSpeed(offload_optimizer=OffloadOptimizer(device=OffloadDevice.CPU))),
            EXPERTS,
            r"offload_optimizer\.device: cpu is not modelled with parallel\.expert = 2",
        ),
    ],
)
def test_what_deepspeed_refuses_with_expert_layers_is_one_line(
    strategy: Strategy, experts: Experts, why: str
) -> None:
    model = model_of(strategy, experts)
    with pytest.raises(ModelError, match=why):
        make_schedule(model, strategy)


def test_experts_in_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be 1 for DeepSpeed, which does not shard experts"):
        strategy_of(2, NATIVE, data=4, tensor=2, expert=2, expert_tensor=2)
