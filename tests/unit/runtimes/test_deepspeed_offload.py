"""DeepSpeed with offload_optimizer and offload_param does what its sources say, step by step."""

from collections import Counter
from dataclasses import replace

import pytest
from offload_traffic import OffloadScheme, tier_bytes, traffic
from small_files import small_files

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.host_traffic import file_bytes, host_bytes, leaves_device
from zsim.schedule.operation import (
    Action,
    Compute,
    Copy,
    HostWait,
    Operation,
    Read,
    StreamOperation,
    Write,
    walk,
)
from zsim.schedule.schedule import Kind, Place, Schedule
from zsim.strategy.optimizer_rule import SGD, ParameterGroup
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed

SHAPE = GPT(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=16)
NUMBERS = 100
"""Bytes of norms and flags for each parameter: what the formulas leave out."""


def strategy(stage: int, micro_batches: int = 1, **said: object) -> Strategy:
    """On two ranks in bf16, with the optimizer on the CPU."""
    options: dict[str, object] = {"offload_optimizer": {"device": "cpu"}, **said}
    return Strategy.of(
        {
            "parallel.data": 2,
            "zero.stage": stage,
            "zero.emulate": DeepSpeed.model_validate(options),
            "train.precision": "bf16",
            "train.gradient_accumulation_steps": micro_batches,
        }
    )


def of_gpt(made: Strategy) -> tuple[Schedule, Model]:
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    return make_schedule(model, made), model


def parameters(model: Model) -> int:
    """Elements, which the ranks divide."""
    assert all(each.elements % 2 == 0 for each in model.parameters)
    return sum(each.elements for each in model.parameters)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("stage", "scheme", "said"),
    [
        (2, OffloadScheme.DEEPSPEED_1_2, {}),
        (3, OffloadScheme.DEEPSPEED_3, {"stage3_param_persistence_threshold": 0}),
    ],
)
def test_links_carry_what_the_published_formulas_say(
    stage: int, scheme: OffloadScheme, said: dict[str, object], micro_batches: int
) -> None:
    made, model = of_gpt(strategy(stage, micro_batches, **said))
    moved = host_bytes(made, made.programs[0])
    told = traffic(scheme, shard=parameters(model) // 2, micro_batches=micro_batches)
    for found, wanted in ((moved.to_host, told.from_gpu), (moved.from_host, told.to_gpu)):
        assert 0 <= found - wanted < NUMBERS * len(model.parameters)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("stage", "scheme", "said"),
    [
        (1, OffloadScheme.DEEPSPEED_1_2, {}),
        (2, OffloadScheme.DEEPSPEED_1_2, {}),
        (3, OffloadScheme.DEEPSPEED_3, {}),
        (3, OffloadScheme.DEEPSPEED_3_PARAMETERS, {"offload_param": {"device": "cpu"}}),
    ],
)
def test_tiers_hold_what_the_published_formulas_say(
    stage: int, scheme: OffloadScheme, said: dict[str, object], micro_batches: int
) -> None:
    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}
    made, model = of_gpt(strategy(stage, micro_batches, **small, **said))
    (program,) = made.programs
    place_of = {pool.name: pool.place for pool in made.pools}
    held: Counter[Place] = Counter()
    for name in program.persistent:
        buffer = program.by_name[name]
        if buffer.kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.MASTER, Kind.MOMENT) or (
            name.endswith("/bounce")
        ):
            held[place_of[buffer.pool]] += buffer.size_bytes
    sums = micro_batches if stage == 2 else 1  # stage 1 adds up on the device
    told = tier_bytes(scheme, parameters=parameters(model), ranks=2, micro_batches=sums)
    assert held[Place.HOST] == told.host
    assert held[Place.DEVICE] == told.gpu


def test_python_reads_a_test_for_infinities_of_each_parameter_as_it_is_reduced() -> None:
    made, model = of_gpt(strategy(2))
    (program,) = made.programs
    waits = [
        each for each in walk(program.step) if isinstance(each, HostWait) and "overflow" in each.id
    ]
    assert len(waits) == len(model.parameters)
    assert all(each.id.startswith("step/backward") for each in waits)


@pytest.mark.parametrize(
    ("said", "stream"),
    [({"overlap_comm": True}, "reduction"), ({"migration_stream": True}, "migration")],
)
def test_nothing_leaves_on_a_stream_of_its_own_since_1219_unless_that_is_asked_for(
    said: dict[str, object], stream: str
) -> None:
    made, _ = of_gpt(strategy(2, 1, **said))
    (program,) = made.programs
    places = {pool.name: pool.place for pool in made.pools}
    streams = {
        each.stream
        for each in walk(program.step)
        if isinstance(each, Copy) and "offload/" in each.id and leaves_device(each, program, places)
    }
    assert streams == {stream}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlaps", [False, True])
def test_gradients_that_are_copied_on_a_stream_of_their_own_are_those_of_one_stream(
    stage: int, overlaps: bool
) -> None:
    said = {"migration_stream": True, "overlap_comm": overlaps, "reduce_bucket_size": 60}
    made, _ = of_gpt(strategy(stage, 2, **said))
    assert check(made) == ()


def test_a_stream_for_copies_needs_an_optimizer_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="migration_stream"):
        strategy(2, migration_stream=True, offload_optimizer={"device": "none"})


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_late_update_is_delivered_by_the_next_backward_and_gathered_after_the_update(
    precision: str,
) -> None:
    late = strategy(2, 2, migration_stream=True, delay_param_update=True, reduce_bucket_size=60)
    made, model = of_gpt(late.but({"train.precision": precision}))
    assert check(made) == ()
    (program,) = made.programs
    copies = [each for each in walk(program.step) if isinstance(each, Copy)]
    kinds = {buffer.name: buffer.kind for buffer in program.buffers}
    delivered = [each for each in copies if kinds[each.target.buffer] is Kind.PARAMETER]
    names = [each.id.partition("/deliver/")[2] for each in delivered]
    assert sorted(names) == sorted(each.name for each in model.parameters)
    assert all(each.id.startswith("step/backward/mb1/") for each in delivered)
    last = [each.id for each in walk(program.step) if isinstance(each, StreamOperation)][-1]
    assert last.endswith("/gather")


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_micro_batches_are_summed_in_the_dtype_of_the_model(stage: int) -> None:
    made, _ = of_gpt(strategy(stage, 3, offload_optimizer={"device": "none"}))
    (program,) = made.programs
    sums = {
        program.by_name[each.target.buffer].dtype
        for each in walk(program.step)
        if isinstance(each, Copy) and "/accumulate/" in each.id
    }
    assert sums == {DType.BF16}


def test_a_parameter_that_is_delivered_before_its_last_use_is_found() -> None:
    late = strategy(2, 1, migration_stream=True, delay_param_update=True, reduce_bucket_size=60)
    made, _ = of_gpt(late)
    (program,) = made.programs
    first = next(each for each in walk(program.step) if "/deliver/" in each.id)
    early = [each for each in program.step if each is not first]
    wrong = replace(made, programs=(replace(program, step=(first, *early)),))
    assert {each.invariant for each in check(wrong)} & {"races", "values", "order"}


def test_a_late_update_needs_stage_2_and_a_stream_for_copies() -> None:
    for said in ({}, {"migration_stream": False}):
        with pytest.raises(ConfigError, match="delay_param_update"):
            strategy(2, delay_param_update=True, **said)
    with pytest.raises(ConfigError, match="delay_param_update"):
        strategy(1, delay_param_update=True, migration_stream=True)


def test_all_partitions_are_updated_before_the_first_is_gathered() -> None:
    group = ParameterGroup(parameters=("*.ln*",), rule=SGD(momentum=0.25))
    made, _ = of_gpt(
        strategy(2).but({"train.optimizer": SGD(momentum=0.5), "train.groups": (group,)})
    )
    assert len(made.layouts) > 1
    order = [each.id for each in walk(made.programs[0].step)]
    last_upload = max(order.index(name) for name in order if name.endswith("/upload"))
    assert all(order.index(name) > last_upload for name in order if name.endswith("/gather"))


def kinds(operations: list[Operation]) -> list[str]:
    """Reads, updates and writes with the sub-group, each once."""
    found: list[str] = []
    for each in operations:
        is_update = isinstance(each, Compute) and each.action is Action.UPDATE
        if each.id.startswith("step/update/sub_group") and (
            isinstance(each, Read | Write) or is_update
        ):
            group = each.id.split("/")[2].removeprefix("sub_group")
            verb = "update" if is_update else type(each).__name__.lower()
            if not found or found[-1] != f"{verb} {group}":
                found.append(f"{verb} {group}")
    return found


def filed(*, read: bool, write: bool) -> Strategy:
    """Three or more sub-groups in files."""
    optimizer = {
        "device": "nvme",
        "buffer_count": 4 * (1 + read + write),
        "pipeline_read": read,
        "pipeline_write": write,
    }
    return strategy(3, sub_group_size=400, offload_optimizer=optimizer)


def test_one_by_one_a_sub_group_is_read_updated_and_written() -> None:
    with small_files():
        made, model = of_gpt(filed(read=False, write=False))
        assert check(made, model) == ()
    issued = kinds(list(walk(made.programs[0].step)))
    assert issued[:6] == ["read 0", "update 0", "write 0", "read 1", "update 1", "write 1"]


def test_in_the_pipeline_the_next_is_read_while_one_is_updated_and_the_last_written() -> None:
    with small_files():
        made, model = of_gpt(filed(read=True, write=True))
        assert check(made, model) == ()
    (program,) = made.programs
    issued = kinds(list(walk(program.step)))
    assert issued[:6] == ["read 0", "read 1", "update 0", "write 0", "read 2", "update 1"]
    order = [each.id for each in walk(program.step)]
    waited = next(name for name in order if "wait/step/update/sub_group0/write" in name)
    assert order.index("step/update/sub_group1/update") < order.index(waited)
    assert order.index(waited) < order.index("step/update/sub_group1/write/0")


def test_states_in_files_cost_sixteen_bytes_each_way_at_most() -> None:
    with small_files():
        made, model = of_gpt(filed(read=False, write=False))
    moved = file_bytes(made.programs[0])
    shard = parameters(model) // 2
    told = traffic(OffloadScheme.DEEPSPEED_3_NVME, shard=shard)
    assert moved.read == moved.written
    assert 12 * shard < moved.read <= told.nvme_read


def test_what_is_too_small_for_a_file_stays_in_host_memory() -> None:
    """Nothing under a mebibyte is written: of a tiny model, no state is in a file."""
    made, model = of_gpt(filed(read=False, write=False))
    assert check(made, model) == ()
    assert not any(isinstance(each, Read | Write) for each in walk(made.programs[0].step))


@pytest.mark.parametrize(
    ("stage", "said", "message"),
    [
        (
            2,
            {"offload_optimizer": {"device": "nvme"}},
            "is for stage 3; in stage 2 DeepSpeed keeps",
        ),
        (1, {"offload_param": {"device": "cpu"}}, "is for stage 3, in stage 1 every rank"),
        (
            3,
            {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "nvme"}},
            "'nvme' needs an optimizer that is not on the device: offload_optimizer.device",
        ),
        (
            3,
            {"offload_param": {"device": "nvme"}, "zero_hpz_partition_size": 2},
            "is not emulated with zero_hpz_partition_size = 2",
        ),
        (
            3,
            {"offload_optimizer": {"device": "nvme", "pipeline_read": True}},
            "buffer_count: 4 must be at least 8: 2 sub-groups at once with a parameter, a gradient "
            "and 2 moments each",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    stage: int, said: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(stage, 1, **said)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def in_files(**said: object) -> Strategy:
    """Parameters beyond those of the first sub-group are in files."""
    param = {"device": "nvme", "max_in_cpu": 0, "buffer_count": 4, "buffer_size": 512, **said}
    return strategy(
        3,
        stage3_max_reuse_distance=0,
        stage3_param_persistence_threshold=0,
        sub_group_size=400,
        offload_param=param,
    )


def test_shards_in_files_are_read_ahead_as_far_as_there_are_slots() -> None:
    with small_files():
        made, model = of_gpt(in_files(buffer_count=8))
        assert check(made, model) == ()
    (program,) = made.programs
    order = [each.id.split("/") for each in walk(program.step)]
    ahead = [
        unit
        for number, (*_, unit, verb, name) in enumerate(order)
        if verb == "read"
        and next(each for each in order[number:] if each[-2:] == ["fetch", name])[3] != unit
    ]
    assert ahead
    (slots,) = (pool for pool in made.pools if pool.name == "parameter_slots")
    peaks = {pool: size for _, pool, size in made.contract.peak_bytes}
    assert slots.capacity_bytes == 8 * 512 * 2 >= peaks[slots.name]


def test_too_few_slots_say_how_many_are_needed() -> None:
    with small_files(), pytest.raises(ModelError) as caught:
        of_gpt(in_files(buffer_count=2))
    assert str(caught.value) == (
        "zero.deepspeed.offload_param.buffer_count: 2 must be at least 4: so many shards are in "
        "slots while their parameters are whole"
    )


def test_a_slot_that_is_too_small_says_how_large_the_largest_shard_is() -> None:
    with small_files(), pytest.raises(ModelError) as caught:
        of_gpt(in_files(buffer_size=64))
    assert "offload_param.buffer_size: 64 must be at least" in str(caught.value)


def test_what_fits_into_max_in_cpu_is_in_no_file() -> None:
    with small_files():
        made, model = of_gpt(in_files(max_in_cpu=1_000_000))
        assert check(made, model) == ()
    assert not any(isinstance(each, Read | Write) for each in walk(made.programs[0].step))
