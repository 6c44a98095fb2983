"""What other runtimes do is proved, and each thing that they could do wrong is found."""

from collections.abc import Callable
from typing import Any

import pytest
from faults.findings import left, named, unwritten
from faults.schedules import changed, split, without
from runtimes_by_hand import deepspeed, fsdp2, megatron

from zsim.proof import check
from zsim.schedule.operation import Fill, Operand, Reduction, Role, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule


def with_buffer(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401 (any field of a buffer)
    """The schedule with other `fields` of a buffer."""
    (program,) = schedule.programs
    buffers = tuple(
        replace(each, **fields) if each.name == name else each for each in program.buffers
    )
    return replace(schedule, programs=(replace(program, buffers=buffers),))


def after(schedule: Schedule, name: str, *edges: str) -> Schedule:
    """The schedule in which an operation waits for others."""
    return changed(schedule, f"step/{name}", after=tuple(f"step/{each}" for each in edges))


def put_after(schedule: Schedule, name: str, other: str) -> Schedule:
    """The schedule with operation `name` issued just after operation `other`."""
    (program,) = schedule.programs
    rest = [each for each in program.step if each.id != name]
    at = [each.id for each in rest].index(other) + 1
    step = (*rest[:at], program.by_id[name], *rest[at:])
    return replace(schedule, programs=(replace(program, step=step),))


@pytest.mark.parametrize("runtime", [fsdp2, deepspeed, megatron])
def test_a_step_of_another_runtime_is_proved(runtime: Callable[[], Schedule]) -> None:
    assert check(runtime()) == ()


@pytest.mark.parametrize(
    ("runtime", "axis"),
    [
        (fsdp2, "replicate"),
        (fsdp2, "outer"),
        (fsdp2, "inner"),
        (deepspeed, "data"),
        (megatron, "data"),
    ],
)
def test_two_roles_that_do_the_same_are_proved_as_one_is(
    runtime: Callable[[], Schedule], axis: str
) -> None:
    assert check(split(runtime(), runtime(), axis=axis)) == ()


def test_hybrid_shards_that_are_not_reduced_over_replicas_are_found() -> None:
    faulty = without(fsdp2(), "step/all_reduce")
    assert left(after(faulty, "widen", "reduce")) == "step/update"


def test_reducing_over_the_replicas_only_is_found() -> None:
    faulty = after(without(fsdp2(), "step/reduce"), "all_reduce", "copy_in")
    assert unwritten(faulty) == "step/all_reduce"


def test_an_all_reduce_over_the_outer_ranks_instead_of_the_replicas_is_found() -> None:
    assert left(changed(fsdp2(), "step/all_reduce", group="outer")) == "step/update"


def test_shards_over_the_inner_ranks_are_not_gathered_over_the_outer() -> None:
    assert left(changed(fsdp2(), "step/gather_again", group="outer")) == "step/backward"


@pytest.mark.parametrize("group", ["inner", "outer"])
def test_a_gather_over_a_part_of_a_joined_axis_does_not_make_its_shard_whole(group: str) -> None:
    """Nor is the slot of the joined axis the one that the members of the part write."""
    part = View(buffer="gathered", size=6)
    wrong = changed(fsdp2(), "step/gather", group=group, target=part)
    assert named(wrong) == [("races", "step/gather")]


@pytest.mark.parametrize(
    ("left_out", "reader"),
    [("copy_out", "forward"), ("copy_out_again", "backward")],
)
def test_a_copy_that_is_left_out_is_found_where_its_target_is_read(
    left_out: str, reader: str
) -> None:
    assert unwritten(without(fsdp2(), f"step/{left_out}")) == f"step/{reader}"


@pytest.mark.parametrize(
    ("left_out", "before", "reader"),
    [
        ("reshard", "near/allocate", "backward"),
        ("cast", "gathered/allocate", "forward"),
        ("copy_in", "staging/allocate", "reduce"),
    ],
)
def test_a_copy_on_another_stream_that_is_left_out_is_an_unordered_use_of_its_target(
    left_out: str, before: str, reader: str
) -> None:
    finding = check(without(fsdp2(), f"step/{left_out}"))[0]
    assert finding.invariant == "lifetime"
    assert finding.witness[0].startswith(f"step/{before}")
    filled = Fill(
        id=f"step/{left_out}",
        stream="compute",
        target=getattr(fsdp2().programs[0].by_id[f"step/{left_out}"], "target"),  # noqa: B009 (of an operation found by name)
        value=0.0,
    )
    (program,) = fsdp2().programs
    step = tuple(filled if each.id == filled.id else each for each in program.step)
    zeros = replace(fsdp2(), programs=(replace(program, step=step),))
    assert left(zeros) == f"step/{reader}".replace("reduce", "update")


def test_parameters_are_not_read_where_ranks_stand_one_after_the_other() -> None:
    (program,) = fsdp2().programs
    forward: Any = program.by_id["step/forward"]
    operands = tuple(
        replace(each, view=replace(each.view, buffer="gathered"))
        if each.role is Role.PARAMETER
        else each
        for each in forward.operands
    )
    wrong = changed(fsdp2(), "step/forward", operands=operands)
    assert named(wrong) == [("lifetime", "step/forward")]
    assert left(put_after(wrong, "step/gathered/free", "step/forward")) == "step/forward"


def test_a_gathered_tensor_is_not_copied_out_as_it_stands() -> None:
    assert left(changed(fsdp2(), "step/copy_out", by_parameter=False)) == "step/forward"


@pytest.mark.parametrize("target", ["whole", "gathered"])
def test_a_slot_of_a_tensor_that_is_cut_otherwise_is_found(target: str) -> None:
    """The slot is as large, but has other elements: in the plain whole, or along another axis."""
    axis = "data" if target == "whole" else "inner"
    wrong = changed(fsdp2(), "step/cast", target=View(buffer=target, size=3, axis=axis))
    assert unwritten(wrong) == "step/forward"


def test_gradients_in_plain_order_are_not_reduce_scattered_to_blocks() -> None:
    assert left(with_buffer(fsdp2(), "staging", layout="whole")) == "step/update"


def test_the_update_of_a_hybrid_shard_needs_the_gradient_of_all_replicas() -> None:
    faulty = without(fsdp2(), "step/all_reduce", "step/reduce")
    assert unwritten(faulty) == "step/update"


@pytest.mark.parametrize("start", [4, 6])
def test_a_window_on_another_parameter_is_found(start: int) -> None:
    wrong = changed(
        deepspeed(),
        "step/slice_b",
        source=View(buffer="bucket_b", start=start, size=3, layout="flat", origin=0),
        target=View(buffer="gradient", start=start, size=3, layout="flat"),
    )
    assert unwritten(wrong) == "step/update"


@pytest.mark.parametrize("name", ["w", "b"])
def test_a_bucket_whose_slices_are_not_copied_out_is_found(name: str) -> None:
    faulty = without(deepspeed(), f"step/slice_{name}")
    assert named(faulty) == [("lifetime", f"step/bucket_{name}/free")]
    waits = changed(faulty, f"step/bucket_{name}/free", uses=(f"step/reduce_{name}",))
    assert unwritten(waits) == "step/update"


def test_padding_that_nothing_wrote_is_found_in_a_window() -> None:
    assert unwritten(without(deepspeed(), "step/pad")) == "step/update"


@pytest.mark.parametrize("names", [("b",), ("w", "b")])
def test_buckets_that_are_not_all_reduced_are_found(names: tuple[str, ...]) -> None:
    faulty = without(deepspeed(), *(f"step/reduce_{name}" for name in names))
    assert left(faulty) == "step/update"


def test_a_flat_tensor_that_is_not_gathered_is_found_where_it_was_written_last() -> None:
    assert left(without(deepspeed(), "step/gather", "step/wait")) == "step/cast"


def test_a_slice_of_the_wrong_bucket_is_found() -> None:
    source = View(buffer="made_w", start=5, size=3, layout="flat", origin=0)
    assert left(changed(deepspeed(), "step/slice_b", source=source)) == "step/update"


def test_a_bucket_that_takes_the_gradient_of_another_parameter_is_found() -> None:
    wrong = changed(deepspeed(), "step/divide_b", source=View(buffer="made_w", size=3))
    assert left(wrong) == "step/update"


def test_a_bucket_that_is_not_gathered_after_the_update_is_found() -> None:
    for name, kept in (("w", "b"), ("b", "w")):
        waits = changed(megatron(), "step/wait", operation=f"step/gather_{kept}")
        writer = {"w": "gather_b", "b": "gather_w"}[name]
        assert left(without(waits, f"step/gather_{name}")) == f"step/{writer}"


def test_a_bucket_that_is_taken_to_the_place_of_another_is_found() -> None:
    target = View(buffer="gradient", start=2, size=2)
    assert unwritten(changed(megatron(), "step/take_b", target=target)) == "step/update"


def test_updated_shards_are_not_put_into_the_whole_as_one_slot() -> None:
    target = View(buffer="held", size=6, axis="data")
    wrong = changed(megatron(), "step/put", by_parameter=False, target=target)
    assert left(wrong) == "step/gather_b"


def test_gradients_that_are_not_collected_are_found() -> None:
    assert left(without(megatron(), "step/collect")) == "step/update"


def test_an_update_with_a_whole_gradient_of_blocks_is_found() -> None:
    operands = (
        Operand(role=Role.GRADIENT, view=View(buffer="made", size=6, axis="data")),
        Operand(role=Role.MASTER, view=View(buffer="master", size=6)),
    )
    assert left(changed(megatron(), "step/update", operands=operands)) == "step/update"


@pytest.mark.parametrize("divisor", [1, 4, 16])
def test_a_mean_over_other_numbers_of_ranks_than_see_data_is_found(divisor: int) -> None:
    """4 is that of the data axis alone, without the replicas."""
    assert left(changed(fsdp2(), "step/copy_in", divisor=divisor)) == "step/update"


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (1, 0), (0, 1)])
def test_a_reduction_may_divide_as_well(shards: int, replicas: int) -> None:
    def averaging(divisor: int) -> Schedule:
        made = changed(fsdp2(), "step/copy_in", divisor=divisor)
        for name, averages in (("reduce", shards), ("all_reduce", replicas)):
            if averages:
                made = changed(made, f"step/{name}", reduction=Reduction.AVERAGE)
        return made

    assert check(averaging(8 // (4**shards * 2**replicas))) == ()
    assert left(averaging(8)) == "step/update"


def test_the_seed_of_backward_may_divide_by_micro_batches() -> None:
    def seeded(value: float, divisor: int) -> Schedule:
        made = changed(fsdp2(), "step/copy_in", divisor=divisor)
        return changed(made, "step/seed", value=value)

    assert check(seeded(1 / 8, 1)) == ()
    assert check(seeded(16.0, 128)) == ()
    assert left(seeded(1 / 3, 8)) == "step/update"


def test_the_output_is_no_gradient_of_itself() -> None:
    """As if the loss were half its own square."""
    (program,) = deepspeed().programs
    backward: Any = program.by_id["step/backward"]
    operands = tuple(
        replace(each, view=View(buffer="y", size=1)) if each.role is Role.OUTPUT_GRADIENT else each
        for each in backward.operands
    )
    wrong = without(changed(deepspeed(), "step/backward", operands=operands), "step/seed")
    wrong = without(wrong, "step/seed/allocate", "step/seed/free")
    assert left(put_after(wrong, "step/y/free", "step/backward")) == "step/update"


def test_gradients_that_are_divided_differently_are_not_added() -> None:
    schedule = deepspeed()
    (program,) = schedule.programs
    slices: Any = program.by_id["step/slice_b"]

    def twice(*divisors: int) -> Schedule:
        first = replace(slices, divisor=divisors[0])
        more = replace(slices, id="step/more", accumulate=True, divisor=divisors[1])
        step = tuple(
            each
            for operation in program.step
            for each in ((first, more) if operation.id == "step/slice_b" else (operation,))
        )
        made = replace(schedule, programs=(replace(program, step=step),))
        return changed(made, "step/bucket_b/free", uses=("step/more",))

    assert check(twice(2, 2)) == ()
    assert left(twice(2, 1)) == "step/update"


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("cast", "forward"),
        ("copy_out", "forward"),
        ("reshard", "backward"),
        ("copy_out_again", "backward"),
    ],
)
def test_a_parameter_that_is_divided_is_found_where_it_is_used(name: str, reader: str) -> None:
    assert left(changed(fsdp2(), f"step/{name}", divisor=2)) == f"step/{reader}"


def test_a_parameter_is_no_gradient() -> None:
    wrong = changed(fsdp2(), "step/widen", source=View(buffer="shard", size=3))
    assert left(wrong) == "step/update"


def test_a_gradient_is_no_parameter() -> None:
    wrong = changed(deepspeed(), "step/cast", source=View(buffer="wide", size=4))
    assert left(put_after(wrong, "step/wide/free", "step/cast")) == "step/gather"


@pytest.mark.parametrize(("runtime", "name"), [(deepspeed, "cast"), (megatron, "put")])
def test_parameters_are_not_added_to_those_of_the_step_before(
    runtime: Callable[[], Schedule], name: str
) -> None:
    ((family, _),) = named(changed(runtime(), f"step/{name}", accumulate=True))
    assert family == "values"


def test_parameters_may_be_added_to_zero_in_the_own_part_of_a_flat_tensor() -> None:
    schedule = deepspeed()
    (program,) = schedule.programs
    cast: Any = program.by_id["step/cast"]
    zero = Fill(id="step/zero", stream=cast.stream, target=cast.target, value=0.0)
    step = tuple(
        each
        for operation in program.step
        for each in (
            (zero, replace(cast, accumulate=True)) if operation.id == cast.id else (operation,)
        )
    )
    assert check(replace(schedule, programs=(replace(program, step=step),))) == ()
