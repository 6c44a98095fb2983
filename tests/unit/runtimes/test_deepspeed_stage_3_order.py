"""DeepSpeed's stage 3: what is gathered, freed and reduced when, by hand on small models."""

from collections.abc import Sequence

import pytest

from zsim.analysis.schedule_plan import plan
from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    AllGather,
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Free,
    HostWait,
    Operation,
    ReduceScatter,
)
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.deepspeed.stage_3_trace import fetches

EAGER = DeepSpeed(
    stage3_prefetch_bucket_size=0,
    stage3_max_reuse_distance=0,
    stage3_param_persistence_threshold=0,
)
"""Nothing is gathered ahead, nothing kept."""


def chain(*sizes: Sequence[int]) -> Model:
    """Units in a row, each with parameters of so many elements."""
    units: list[Unit] = []
    source = BATCH
    for index, own in enumerate(sizes):
        parameters = tuple(
            Parameter(name=f"unit{index}.{number}", shape=(size,))
            for number, size in enumerate(own)
        )
        output = Value(
            name=f"unit{index}/output",
            elements=1 if index == len(sizes) - 1 else 4,
            dtype=DType.FP32,
        )
        segment = Segment(
            inputs=(source,),
            outputs=(output,),
            parameters=tuple(parameter.name for parameter in parameters),
            saves_input=True,
        )
        units.append(Unit(name=f"unit{index}", parameters=parameters, segments=(segment,)))
        source = output.name
    batch = Value(name=BATCH, elements=4, dtype=DType.INT64, requires_gradient=False)
    return Model(name="chain", units=tuple(units), batch=batch)


def step(
    model: Model, options: DeepSpeed, *, ranks: int = 2, micro_batches: int = 1
) -> list[Operation]:
    """The step, as the host issues it."""
    strategy = Strategy(
        parallel=Parallel(data=ranks),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=micro_batches),
    )
    (program,) = make_schedule(model, strategy).programs
    return list(program.step)


def numbers(
    needs: Sequence[Sequence[int]], options: DeepSpeed
) -> list[tuple[tuple[int, ...], ...]]:
    """Needed, ahead and freed of each visit; parameters have ten elements."""
    sizes = [10] * (1 + max(max(own) for own in needs))
    return [
        (fetch.needed, fetch.ahead, fetch.freed) for fetch in fetches(needs, sizes, (), options)
    ]


THREE = [(0,), (1,), (2,), (2,), (1,), (0,)]


def test_without_limits_everything_is_gathered_at_once_and_kept_until_its_last_use() -> None:
    found = numbers(THREE, DeepSpeed())
    assert found[0] == ((0,), (1, 2), ())
    assert found[1:4] == [((), (), ()), ((), (), ()), ((), (), (2,))]
    assert found[4:] == [((), (), (1,)), ((), (), (0,))]


def test_nothing_ahead_and_nothing_kept_gathers_every_parameter_twice() -> None:
    assert numbers(THREE, EAGER) == [((own,), (), (own,)) for (own,) in THREE]


def test_one_unit_ahead_passes_over_what_is_there() -> None:
    options = EAGER.but(stage3_prefetch_bucket_size=10)
    assert numbers(THREE, options) == [
        ((0,), (1,), (0,)),
        ((), (2,), (1,)),
        ((), (1,), (2,)),  # the use of the very next visit does not keep it
        ((2,), (0,), (2,)),
        ((), (), (1,)),
        ((), (), (0,)),
    ]


def test_what_was_passed_over_as_there_for_a_later_use_is_kept() -> None:
    four = [(0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)]
    assert numbers(four, EAGER.but(stage3_prefetch_bucket_size=20)) == [
        ((0,), (1, 2), (0,)),
        ((), (0, 3), ()),  # looks past 3, 3, 2 and 1, of which 2 and 1 are there
        ((), (), ()),
        ((), (), (3,)),
        ((3,), (), (3,)),
        ((), (), (2,)),
        ((), (), (1,)),
        ((), (), (0,)),
    ]


@pytest.mark.parametrize(
    ("distance", "kept"), [(0, []), (1, [2]), (20, [2]), (21, [1, 2]), (41, [0, 1, 2])]
)
def test_what_begins_within_the_reuse_distance_is_kept(distance: int, kept: list[int]) -> None:
    found = numbers(THREE, EAGER.but(stage3_max_reuse_distance=distance))
    freed = [each for fetch in found[:3] for each in fetch[2]]
    assert [each for each in (0, 1, 2) if each not in freed] == kept
    again = [() if each in kept else (each,) for each in (2, 1, 0)]
    assert [fetch[0] for fetch in found[3:]] == again


def test_live_parameters_only_keep_from_gathering_ahead() -> None:
    options = EAGER.but(stage3_prefetch_bucket_size=10, stage3_max_live_parameters=10)
    assert numbers(THREE, options) == numbers(THREE, EAGER)
    assert numbers(THREE, options.but(stage3_max_live_parameters=21)) == numbers(
        THREE, options.but(stage3_max_live_parameters=10**9)
    )


def test_the_host_gathers_what_is_needed_then_waits_then_gathers_ahead() -> None:
    operations = step(chain([10, 6], [10, 6], [10, 6]), EAGER.but(stage3_prefetch_bucket_size=16))
    names = [each.id.removeprefix("step/forward/mb0/") for each in operations]
    streams = [name for name in names if name.split("/")[1:2] != ["allocate"]]
    first = [name for name in streams if name.startswith("unit0/")]
    assert first == [
        "unit0/put_together/gather0/sub_group0/parameter",
        "unit0/gather/gather0",
        "unit0/free/gather0/shard",
        "unit0/copy_out/parameter0",
        "unit0/copy_out/parameter1",
        "unit0/free/gather0/flat",
        "unit0/put_together/gather1/sub_group0/parameter",
        "unit0/gather/gather1",
        "unit0/free/gather1/shard",
        "unit0/forward0",
        "unit0/free/parameter0/whole",
        "unit0/free/parameter1/whole",
    ]
    waits = [each.after for each in operations if isinstance(each, Compute) and each.unit]
    assert waits[:2] == [
        ("step/forward/mb0/unit0/copy_out/parameter1",),
        ("step/forward/mb0/unit1/copy_out/parameter3",),
    ]


def test_the_host_goes_on_with_two_unfinished_fetches_and_waits_with_three() -> None:
    operations = step(chain(*[[10]] * 6), EAGER)
    fetched = [each.id for each in operations if isinstance(each, AllGather)]
    waits = [
        each.operation for each in operations if isinstance(each, HostWait) and "fetch" in each.id
    ]
    assert len(fetched) == 12
    assert waits == fetched[:9]
    place = {each.id: number for number, each in enumerate(operations)}
    for number, each in enumerate(fetched[3:]):
        # The gather is issued, and before it is waited for the third last must have finished.
        assert isinstance(operations[place[each] + 1], HostWait), number


def test_gradients_are_reduced_before_one_would_be_too_much_for_the_bucket() -> None:
    model = chain([4], [3, 4], [9], [2])
    operations = step(model, EAGER.but(reduce_bucket_size=8), micro_batches=2)
    reduced = [each for each in operations if isinstance(each, ReduceScatter)]
    # Backward makes 2; 9, too large for the bucket; 4 and 3 of unit 1, the last first; 4.
    assert [each.source.size for each in reduced] == [2, 10, 4 + 4, 4] * 2
    large = [
        each
        for each in operations
        if isinstance(each, Copy) and each.id.endswith("put_together/reduction1")
    ]
    assert [each.source.buffer for each in large] == ["unit2/gradient0"] * 2
    verbs = [each.id.split("/")[4] for each in operations if "/sub_group0/gradient/" in each.id]
    assert verbs == ["set"] * 4 + ["add"] * 4


@pytest.mark.parametrize("size", [1, 8, 1000])
def test_the_bucket_has_its_size_whatever_fills_it_from_set_up_on(size: int) -> None:
    options = EAGER.but(reduce_bucket_size=size)
    strategy = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, emulate=options),
        train=Train(precision=Precision.BF16),
    )
    made = make_schedule(chain([4], [3, 4], [9], [2]), strategy)
    assert check(made) == ()
    (program,) = made.programs
    buckets = {each.name for each in program.buffers if each.name.endswith("bucket")}
    alive = set(program.persistent) & buckets
    assert len(alive) == 1
    assert {program.by_name[name].size_bytes for name in buckets} == {2 * size}
    for each in program.step:  # filled in another form, it is given back and taken at once
        if isinstance(each, Free) and each.buffer in buckets:
            alive.remove(each.buffer)
        elif isinstance(each, Allocate) and each.buffer in buckets:
            alive.add(each.buffer)
            assert len(alive) == 1
    assert alive == set(program.persistent) & buckets


def test_no_more_than_two_reductions_are_unfinished_and_backward_ends_with_none() -> None:
    operations = step(chain(*[[4]] * 6), EAGER.but(reduce_bucket_size=4))
    settled = [each.id for each in operations if "/sub_group0/gradient/" in each.id]
    waits = [
        each.operation
        for each in operations
        if isinstance(each, HostWait) and "fetch" not in each.id
    ]
    assert waits == [*settled[:3], settled[-1]]


def test_gradients_are_reduced_in_the_format_that_is_asked_for() -> None:
    options = DeepSpeed(communication_data_type=DType.FP32)
    strategy = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, emulate=options),
        train=Train(precision=Precision.BF16),
    )
    (program,) = make_schedule(chain([4], [4]), strategy).programs
    (reduced,) = [each for each in program.step if isinstance(each, ReduceScatter)]
    assert reduced.wire is DType.FP32
    assert program.by_name["sub_group0/gradient"].dtype is DType.BF16


@pytest.mark.parametrize(("size", "groups"), [(1, 4), (5, 3), (10, 2), (23, 1), (24, 1)])
def test_every_sub_group_has_its_norm_reduced_though_nothing_is_clipped(
    size: int, groups: int
) -> None:
    # Shards have 5, 3, 10 and 5 elements.
    model = chain([10, 6], [19], [10])
    operations = step(model, EAGER.but(sub_group_size=size))
    assert sum(isinstance(each, AllReduce) for each in operations) == groups


@pytest.mark.parametrize("stage", [1, 2])
def test_before_stage_3_one_norm_is_reduced_though_nothing_is_clipped(stage: int) -> None:
    strategy = Strategy(
        parallel=Parallel(data=2), zero=Zero(stage=stage, emulate=DeepSpeed(reduce_bucket_size=50))
    )
    made = make_schedule(chain([10, 6], [19], [10]), strategy)
    (program,) = made.programs
    scalars = [
        each for each in program.step if isinstance(each, AllReduce) and each.source.size == 1
    ]
    assert [(each.id, each.wire) for each in scalars] == [("step/update/norm/reduce", DType.FP32)]
    assert check(made) == ()


def test_small_parameters_are_freed_for_the_update_and_gathered_one_by_one_after_it() -> None:
    options = EAGER.but(stage3_param_persistence_threshold=6)
    operations = step(chain([10, 6], [10, 5]), options)
    names = [each.id for each in operations]
    small = {"parameter1/whole", "parameter3/whole"}
    freed = [each for each in operations if isinstance(each, Free) and each.buffer in small]
    assert [each.id.split("/")[1] for each in freed] == ["update", "update"]
    gathers = [each for each in operations if isinstance(each, AllGather)]
    found = [(each.id, each.target.size) for each in gathers if each.target.buffer in small]
    assert found == [("step/end/gather/parameter1", 6), ("step/end/gather/parameter3", 6)]
    assert names[-1] == "step/end/host_wait"
    # in fp32 the sub-group is its own master: nothing is cast after the update
    assert names.index("step/update/sub_group0/update") < names.index(found[0][0])


SHAPE = GPT(
    layers=3,
    hidden_size=8,
    attention_heads=2,
    sequence_length=4,
    vocab_size=19,
    tied_embeddings=False,
)


@pytest.mark.matrix(9)
@pytest.mark.parametrize("ranks", [2, 8, 1024])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_the_volume_is_twice_what_is_not_small_and_once_what_is(
    ranks: int, micro_batches: int, precision: Precision
) -> None:
    model = gpt(SHAPE, micro_batch_size=1, precision=precision)
    options = EAGER.but(stage3_param_persistence_threshold=32)
    assert volume(model, options, ranks, micro_batches) == (
        parts(model, ranks, small=True) + 2 * micro_batches * parts(model, ranks, small=False),
        0,
        micro_batches * (parts(model, ranks, small=True) + parts(model, ranks, small=False)),
    )
    kept = DeepSpeed(stage3_param_persistence_threshold=32)
    assert volume(model, kept, ranks, micro_batches)[0] == (
        parts(model, ranks, small=True) + micro_batches * parts(model, ranks, small=False)
    )


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("ranks", "inner"), [(2, 2), (8, 4), (1024, 8)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_with_secondary_shards_all_but_the_first_gather_stay_inside(
    ranks: int, inner: int, micro_batches: int
) -> None:
    model = gpt(SHAPE, micro_batch_size=1)
    once = parts(model, ranks, small=True) + parts(model, ranks, small=False)
    padded = once // (ranks - 1) * ranks
    options = EAGER.but(zero_hpz_partition_size=inner)
    assert volume(model, options, ranks, micro_batches) == (
        once,
        (2 * micro_batches - 1) * padded * (inner - 1) // inner,
        micro_batches * once,
    )


def parts(model: Model, ranks: int, *, small: bool) -> int:
    """Elements that a rank sends to gather the parameters up to 32 elements, or the others."""
    return sum(
        (ranks - 1) * -(-parameter.elements // ranks)
        for parameter in model.parameters
        if (parameter.elements <= 32) is small
    )


def volume(
    model: Model, options: DeepSpeed, ranks: int, micro_batches: int
) -> tuple[int, int, int]:
    """Elements sent in gathers over all ranks, over the inner ranks, and in reductions."""
    dtype = model.loss.dtype
    strategy = Strategy(
        parallel=Parallel(data=ranks),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=micro_batches, precision=Precision(dtype.value)),
    )
    found = {
        (line.group, line.collective): line.bytes // dtype.size_bytes
        for line in plan(make_schedule(model, strategy), model).wire_bytes
    }
    lines = (("data", "all_gather"), ("inner", "all_gather"), ("data", "reduce_scatter"))
    first, second, third = (found.get(line, 0) for line in lines)
    return first, second, third


@pytest.mark.parametrize("sizes", [[[0]], [[0], [3]], [[3], [], [0, 0]]])
def test_empty_parameters_are_neither_gathered_nor_freed(sizes: list[list[int]]) -> None:
    model = chain(*sizes)
    made = make_schedule(
        model, Strategy(parallel=Parallel(data=2), zero=Zero(stage=3, emulate=EAGER))
    )
    assert list(check(made, model)) == []
    views = [each.target for each in made.programs[0].step if isinstance(each, AllGather)]
    assert all(view.size for view in views)


def test_secondary_shards_are_for_stage_3_alone() -> None:
    options = DeepSpeed(zero_hpz_partition_size=2)
    assert Strategy(parallel=Parallel(data=3), zero=Zero(stage=2, emulate=options)).inner is None
    assert Strategy(parallel=Parallel(data=4), zero=Zero(stage=3, emulate=options)).inner == 2


def test_a_fetch_of_what_came_with_another_ends_with_the_stream_as_it_is_by_then() -> None:
    options = EAGER.but(stage3_prefetch_bucket_size=20)
    operations = step(chain(*[[10]] * 8), options)
    waits = [
        (each.id.split("/")[3], each.operation)
        for each in operations
        if isinstance(each, HostWait) and "fetch" in each.id and "forward" in each.id
    ]
    # Unit 0 fetches itself and gathers 1 and 2 ahead; unit 1 copies both out and gathers on.
    part = "step/forward/mb0"
    assert waits[:3] == [
        ("unit3", f"{part}/unit0/gather/parameter0"),
        ("unit4", f"{part}/unit1/copy_out/parameter2"),
        ("unit5", f"{part}/unit1/gather/gather1"),
    ]
