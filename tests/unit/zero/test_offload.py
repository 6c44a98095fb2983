"""[offload]: states and parameters on the host or on NVMe, in zsim's own stages."""

from itertools import product

import pytest

from zsim.analysis.schedule_plan import plan
from zsim.config_error import ConfigError
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, Copy, HostWait, Read, Write, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Place
from zsim.strategy.strategy import Strategy

SHAPE = GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)


def strategy(stage: int, **said: object) -> Strategy:
    """Two data ranks in a stage; `said` are keys, with `__` for the dot."""
    made = Strategy.of({"parallel": {"data": 2}, "zero": {"stage": stage}})
    return made.but({key.replace("__", "."): value for key, value in said.items()})


COMBINATIONS = [
    (stage, optimizer, parameters)
    for stage, optimizer, parameters in product(
        range(4), ("host", "nvme"), ("device", "host", "nvme")
    )
    if stage == 3 or parameters == "device"
]


@pytest.mark.matrix(18)
@pytest.mark.parametrize(("stage", "optimizer", "parameters"), COMBINATIONS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_pair_of_tiers_is_proved(
    stage: int, optimizer: str, parameters: str, precision: str
) -> None:
    for gradients in ("host", "nvme") if optimizer == "nvme" else ("host",):
        made = of_tiers(stage, optimizer, parameters, gradients, precision)
        model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
        assert check(make_schedule(model, made), model) == ()


def of_tiers(
    stage: int, optimizer: str, parameters: str, gradients: str, precision: str
) -> Strategy:
    """Small sub-groups of states in these tiers, clipped, of two micro-batches."""
    return strategy(
        stage,
        offload__optimizer=optimizer,
        offload__gradients=gradients,
        offload__parameters=parameters,
        offload__sub_group_elements=30,
        train__precision=precision,
        train__clip_norm=1.0,
        train__gradient_accumulation_steps=2,
    )


def test_a_verdict_that_leaves_a_buckets_gradients_out_is_found() -> None:
    """The parts of an overflow test are added up: without one, its bucket is not covered."""
    made = of_tiers(3, "nvme", "device", "nvme", "fp16")
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    schedule = make_schedule(model, made)
    (program,) = schedule.programs
    adds = [
        each.id
        for each in walk(program.step)
        if isinstance(each, Copy) and each.accumulate and "overflow" in each.id
    ]
    assert adds
    step = tuple(
        replace(each, accumulate=False) if isinstance(each, Copy) and each.id == adds[0] else each
        for each in program.step
    )
    wrong = replace(schedule, programs=(replace(program, step=step),))
    assert any("does not reach it" in each.why for each in check(wrong, model))


def test_a_parameter_costs_two_bytes_out_and_two_back_as_zero_offload_says() -> None:
    """Ren et al. 2021, section 3: of all cuts, none moves less."""
    made = strategy(2, offload__optimizer="host", train__precision="bf16")
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    schedule = make_schedule(model, made)
    padded = sum(layout.elements for layout in schedule.layouts)
    moved = plan(schedule, model).host_bytes
    assert (moved.to_host, moved.from_host) == (2 * padded // 2, 2 * padded // 2)


def test_states_on_nvme_are_read_and_written_once_with_16_bit_parameters_each_time() -> None:
    """ZeRO-Infinity: 12 bytes of states each way; 2 for each gather, 2 when it is updated."""
    made = strategy(
        3, offload__optimizer="nvme", offload__parameters="nvme", train__precision="bf16"
    )
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    schedule = make_schedule(model, made)
    shard = sum(layout.elements for layout in schedule.layouts) // 2
    gathered = {
        each.source.buffer
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Read) and each.source.buffer.endswith("/parameter")
    }
    assert gathered == {f"{layout.name}/parameter" for layout in schedule.layouts}
    moved = plan(schedule, model).file_bytes
    # Backward of the loss reads its parameters again, but for the last unit's, which are kept.
    assert moved.written == 12 * shard + 2 * shard
    assert 12 * shard + 2 * shard < moved.read <= 12 * shard + 4 * shard


def test_while_one_sub_group_is_updated_the_next_is_read_and_the_last_written() -> None:
    made = strategy(1, offload__optimizer="nvme", offload__sub_group_elements=40)
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    (program,) = make_schedule(model, made).programs
    issued = [
        type(each).__name__
        for each in walk(program.step)
        if isinstance(each, Read | Write)
        or (isinstance(each, Compute) and each.action is Action.UPDATE)
    ]
    first = issued.index("Compute")
    assert issued[:first].count("Read") == 2 * 3
    second = issued.index("Compute", first + 1)
    assert issued[first + 1 : second].count("Read") == 3
    assert issued[first + 1 : second].count("Write") == 3


@pytest.mark.parametrize(("read", "write", "sets"), [(0, 0, 1), (1, 0, 2), (0, 1, 2), (1, 1, 3)])
def test_the_pipeline_takes_as_many_slots_as_it_has_sub_groups_at_once(
    read: int, write: int, sets: int
) -> None:
    made = strategy(
        1,
        offload__optimizer="nvme",
        offload__sub_group_elements=40,
        offload__pipeline_read=bool(read),
        offload__pipeline_write=bool(write),
    )
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    schedule = make_schedule(model, made)
    (slots,) = [pool for pool in schedule.pools if pool.slot_bytes is not None]
    assert slots.place is Place.HOST
    assert (slots.capacity_bytes, slots.slot_bytes) == (sets * 3 * 40 * 4, 40 * 4)
    peaks = {pool: size for _, pool, size in schedule.contract.peak_bytes}
    assert peaks[slots.name] == slots.capacity_bytes
    assert check(schedule, model) == ()


def test_the_host_waits_for_nothing_of_the_pipeline_but_what_goes_to_the_device() -> None:
    made = strategy(1, offload__optimizer="nvme", offload__sub_group_elements=40)
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    schedule = make_schedule(model, made)
    waits = [each for each in walk(schedule.programs[0].step) if isinstance(each, HostWait)]
    assert len(waits) == len(schedule.layouts)


@pytest.mark.parametrize(
    ("stage", "said", "message"),
    [
        (
            2,
            {"offload__optimizer": "host", "offload__parameters": "host"},
            "offload.parameters: 'host' is for stage 3, in stage 2 every rank holds all parameters",
        ),
        (
            3,
            {"offload__parameters": "nvme"},
            "offload.parameters: 'nvme' needs an optimizer that is on the host too",
        ),
        (
            1,
            {"offload__optimizer": "nvme", "offload__buffers": 5},
            "offload.buffers: 5 must be at least 9: 3 sub-groups at once with a master and 2 "
            "moments each",
        ),
        (
            1,
            {"offload__optimizer": "host", "offload__gradients": "nvme"},
            "offload.gradients: 'nvme' needs optimizer = nvme",
        ),
        (1, {"offload__optimizer": "tape"}, "offload.optimizer"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    stage: int, said: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(stage, **said)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
