"""What other runtimes do passes, and each thing that they could do wrong is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from mutation import changed, the_finding, without
from runtimes_by_hand import deepspeed, fsdp2, megatron

from zsim.builder import ScheduleBuilder
from zsim.check import Finding, check
from zsim.operation import Action, Fill, Operand, Reduction, Role, View
from zsim.schedule import Contract, Schedule

FAMILIES = ("placement", "value", "partition")


def found(schedule: Schedule, *families: str) -> list[tuple[str, str]]:
    """Operation and reason of every finding of these families."""
    return [(each.operation, each.why) for each in check(schedule) if each.invariant in families]


def first(schedule: Schedule) -> Finding:
    """The first finding about where values are and which they are."""
    return next(each for each in check(schedule) if each.invariant in FAMILIES)


def with_buffer(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401 (any field of a buffer)
    """The schedule with other `fields` of a buffer."""
    (program,) = schedule.programs
    buffers = tuple(
        replace(each, **fields) if each.name == name else each for each in program.buffers
    )
    return replace(schedule, programs=(replace(program, buffers=buffers),))


@pytest.mark.parametrize("runtime", [fsdp2, deepspeed, megatron])
def test_a_step_of_another_runtime_is_proved(runtime: Callable[[], Schedule]) -> None:
    assert check(runtime()) == ()


def test_hybrid_shards_that_are_not_reduced_over_replicas_are_found() -> None:
    faulty = the_finding(without(fsdp2(), "step/all_reduce"), "placement")
    assert faulty.operation == "step/update"
    assert "wide, which is Partial over replicate" in faulty.why


def test_reducing_over_the_replicas_only_is_found() -> None:
    assert first(without(fsdp2(), "step/reduce")).operation == "step/all_reduce"


def test_an_all_reduce_over_the_outer_ranks_instead_of_the_replicas_is_found() -> None:
    wrong = changed(fsdp2(), "step/all_reduce", group="outer")
    assert found(wrong, "placement")[:2] == [
        ("step/all_reduce", "ranks bring different parts of the tensor in gradient"),
        (
            "step/all_reduce",
            "reduces gradient, which is Shard over outer: it must be Partial over outer",
        ),
    ]


def test_shards_over_the_inner_ranks_are_not_gathered_over_the_outer() -> None:
    wrong = changed(fsdp2(), "step/gather_again", group="outer")
    assert first(wrong).operation == "step/gather_again"
    assert "gathers near, which is Replicate over outer: it must be Shard" in first(wrong).why


def test_a_gather_over_the_inner_ranks_alone_does_not_make_a_joined_shard_whole() -> None:
    part = View(buffer="gathered", size=6)
    wrong = changed(fsdp2(), "step/gather", group="inner", target=part)
    assert first(wrong).operation == "step/gather"
    assert first(wrong).why == "gathered and gathered hold different tensors"
    assert "the parts of ranks over inner in turn" in first(wrong).witness[0]


def test_gathering_a_joined_shard_over_outer_ranks_is_out_of_order() -> None:
    wrong = changed(fsdp2(), "step/gather", group="outer", target=View(buffer="gathered", size=6))
    assert first(wrong).operation == "step/gather"


@pytest.mark.parametrize(
    ("left_out", "reader"),
    [
        ("copy_out", "forward"),
        ("copy_out_again", "backward"),
        ("reshard", "gather_again"),
        ("cast", "gather"),
        ("copy_in", "reduce"),
    ],
)
def test_a_copy_that_is_left_out_is_found_where_its_target_is_read(
    left_out: str, reader: str
) -> None:
    finding = first(without(fsdp2(), f"step/{left_out}"))
    assert finding.operation == f"step/{reader}"
    assert "is written by nothing" in finding.why


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
    why = "computes with gathered, in which the parts of a parameter are not together"
    assert found(wrong, "partition") == [("step/forward", why)] * 2


def test_a_gathered_tensor_is_not_copied_out_as_it_stands() -> None:
    wrong = changed(fsdp2(), "step/copy_out", by_parameter=False)
    finding = the_finding(wrong, "placement")
    assert (finding.operation, finding.why) == (
        "step/copy_out",
        "gathered and whole hold different tensors",
    )
    cut, whole = finding.witness
    assert "the parts of 4 ranks in turn in 2 blocks" in cut
    assert whole == "whole has layout whole: elements 0 to 12"


def test_a_slot_of_a_tensor_that_is_cut_otherwise_is_found() -> None:
    """The slot is as large, but in the plain whole it has other elements."""
    wrong = changed(fsdp2(), "step/cast", target=View(buffer="whole", size=3, axis="data"))
    finding = first(wrong)
    assert (finding.operation, finding.why) == (
        "step/cast",
        "shard and whole hold different tensors",
    )


def test_a_slot_along_another_axis_is_found() -> None:
    wrong = changed(fsdp2(), "step/cast", target=View(buffer="gathered", size=3, axis="inner"))
    assert first(wrong).operation in {"step/cast", "step/gather"}


def test_gradients_in_plain_order_are_not_reduce_scattered_to_blocks() -> None:
    wrong = with_buffer(fsdp2(), "staging", layout="whole")
    finding = the_finding(wrong, "placement")
    assert finding.operation == "step/reduce"
    assert finding.why == "gradient and staging hold different tensors"


def test_a_slot_is_read_as_it_was_written_even_where_no_layout_says_what_it_is() -> None:
    """Slots of 1 x 4 elements and of 2 x 2: what the ranks wrote is not where they read."""

    def gathering(*axes: str) -> list[Finding]:
        build = ScheduleBuilder.of("slots", outer=2, inner=2)
        build.group("outer", "outer")
        x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 8, persistent=True)
        build.setup.allocate(x, y)
        build.setup.compute("load", Action.LOAD, [(Role.OUTPUT, x.all)])
        build.step.copy("copy", x.all, y.own(axes[0], 4))
        build.step.all_gather("gather", "outer", y.own(axes[1], 4), y.all, after=["step/copy"])
        schedule = build.schedule(Contract(data_axes=("outer", "inner")))
        return [each for each in check(schedule) if each.invariant == "placement"]

    assert gathering("outer", "outer") == []
    (finding,) = gathering("inner", "outer")
    assert finding.operation == "step/gather"
    assert "y, which is valid only in the rank's own part over inner" in finding.why


def test_the_update_of_a_hybrid_shard_needs_the_gradient_of_all_replicas() -> None:
    assert first(without(fsdp2(), "step/all_reduce", "step/reduce")).operation == "step/widen"


def test_a_window_on_another_parameter_is_found() -> None:
    schedule = deepspeed()
    for start in (4, 6):
        wrong = changed(
            schedule,
            "step/slice_b",
            source=View(buffer="bucket_b", start=start, size=3, layout="flat", origin=0),
            target=View(buffer="gradient", start=start, size=3, layout="flat"),
        )
        finding = first(wrong)
        assert finding.operation == "step/slice_b"
        assert "bucket_b" in finding.why


def test_a_bucket_whose_slices_are_not_copied_out_is_found() -> None:
    for name in ("w", "b"):
        finding = the_finding(without(deepspeed(), f"step/slice_{name}"), "placement")
        assert finding.operation == "step/widen"
        assert "gradient, which is written by nothing" in finding.why


def test_padding_that_nothing_wrote_is_found_in_a_window() -> None:
    assert the_finding(without(deepspeed(), "step/pad"), "placement").operation == "step/widen"


def test_a_bucket_that_is_not_all_reduced_is_found() -> None:
    finding = the_finding(without(deepspeed(), "step/reduce_b"), "placement")
    assert finding.operation == "step/widen"
    assert "Replicate, Shard or Partial in different places" in finding.why


def test_a_slice_that_is_copied_before_the_reduction_stays_partial() -> None:
    faulty = without(deepspeed(), "step/reduce_b", "step/reduce_w")
    assert "wide, which is Partial over data" in the_finding(faulty, "placement").why


def test_a_flat_tensor_that_is_not_gathered_is_found_in_the_next_step() -> None:
    faulty = without(deepspeed(), "step/gather", "step/wait")
    finding = first(faulty)
    assert finding.operation == "step/forward"
    assert "flat, which is valid only in the rank's own part over data" in finding.why


def test_a_slice_of_the_wrong_bucket_is_found() -> None:
    source = View(buffer="made_w", start=5, size=3, layout="flat", origin=0)
    wrong = changed(deepspeed(), "step/slice_b", source=source)
    assert first(wrong).operation == "step/slice_b"


def test_a_bucket_that_takes_the_gradient_of_another_parameter_is_found() -> None:
    wrong = changed(deepspeed(), "step/divide_b", source=View(buffer="made_w", size=3))
    finding = first(wrong)
    assert (finding.operation, finding.why) == (
        "step/divide_b",
        "made_w and bucket_b hold different tensors",
    )


def test_a_bucket_that_is_not_gathered_after_the_update_is_found() -> None:
    for name in ("w", "b"):
        finding = first(without(megatron(), f"step/gather_{name}", "step/wait"))
        assert finding.operation == "step/forward"
        assert "held, which is valid only in the rank's own part" in finding.why


def test_a_bucket_that_is_taken_to_the_place_of_another_is_found() -> None:
    target = View(buffer="gradient", start=2, size=2)
    finding = first(changed(megatron(), "step/take_b", target=target))
    assert (finding.operation, finding.why) == (
        "step/take_b",
        "made and gradient hold different tensors",
    )


def test_updated_shards_are_not_put_into_the_whole_as_one_slot() -> None:
    target = View(buffer="held", size=6, axis="data")
    wrong = changed(megatron(), "step/put", by_parameter=False, target=target)
    assert first(wrong).operation == "step/put"


def test_gradients_that_are_not_collected_are_found() -> None:
    finding = the_finding(without(megatron(), "step/collect"), "value")
    assert finding.operation == "step/update"
    assert "gradient, which is zeros, not a gradient divided by 2" in finding.why


def test_an_update_with_a_whole_gradient_of_blocks_is_found() -> None:
    operands = (
        Operand(role=Role.GRADIENT, view=View(buffer="made", size=6, axis="data")),
        Operand(role=Role.MASTER, view=View(buffer="master", size=6)),
    )
    wrong = changed(megatron(), "step/update", operands=operands)
    assert "made and master hold different tensors" in {why for _, why in found(wrong, "placement")}


def test_gradients_of_other_parameters_are_found() -> None:
    (program,) = megatron().programs
    backward: Any = program.by_id["step/backward"]
    operands = tuple(
        replace(each, view=replace(each.view, start=each.view.start // 2 + 1))
        if each.role is Role.GRADIENT
        else each
        for each in backward.operands
    )
    wrong = changed(megatron(), "step/backward", operands=operands)
    why = "makes gradients of a part of alone that is no parameter"
    assert found(wrong, "partition") == [("step/backward", why)] * 2


@pytest.mark.parametrize("divisor", [1, 4, 16])
def test_a_mean_over_other_numbers_of_ranks_than_see_data_is_found(divisor: int) -> None:
    """4 is that of the data axis alone, without the replicas."""
    finding = the_finding(changed(fsdp2(), "step/copy_in", divisor=divisor), "value")
    assert finding.operation == "step/update"
    state = f"a gradient divided by {divisor}".removesuffix(" divided by 1")
    assert finding.why == f"updates with wide, which is {state}, not a gradient divided by 8"


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (1, 0), (0, 1)])
def test_a_reduction_may_divide_as_well(shards: int, replicas: int) -> None:
    def averaging(divisor: int) -> Schedule:
        made = changed(fsdp2(), "step/copy_in", divisor=divisor)
        for name, averages in (("reduce", shards), ("all_reduce", replicas)):
            if averages:
                made = changed(made, f"step/{name}", reduction=Reduction.AVERAGE)
        return made

    assert check(averaging(8 // (4**shards * 2**replicas))) == ()
    finding = the_finding(averaging(8), "value")
    state = f"a gradient divided by {8 * 4**shards * 2**replicas}"
    assert f"which is {state}, not" in finding.why


def test_the_seed_of_backward_may_divide_by_micro_batches() -> None:
    def seeded(value: float, divisor: int) -> list[tuple[str, str]]:
        schedule = changed(fsdp2(), "step/copy_in", divisor=divisor)
        (program,) = schedule.programs
        seed = Fill(id="step/seed", stream="compute", target=View(buffer="y", size=2), value=value)
        at = [each.id for each in program.step].index("step/backward")
        step = (*program.step[:at], seed, *program.step[at:])
        return found(replace(schedule, programs=(replace(program, step=step),)), "value")

    assert seeded(1 / 8, 1) == []
    ((operation, why),) = seeded(1 / 3, 8)
    assert operation == "step/update"
    assert "which is a gradient divided by 24, not" in why
    assert seeded(16.0, 128) == []


def test_gradients_that_are_divided_differently_are_not_added() -> None:
    schedule = deepspeed()
    (program,) = schedule.programs
    slices: Any = program.by_id["step/slice_b"]
    more = replace(slices, id="step/more", accumulate=True)
    undivided = replace(slices, id="step/copy", divisor=2)
    step = tuple(
        each
        for operation in program.step
        for each in ((undivided, more) if operation.id == "step/slice_b" else (operation,))
    )
    faulty = replace(schedule, programs=(replace(program, step=step),))
    assert found(faulty, "value")[0] == (
        "step/more",
        "adds bucket_b, a gradient divided by 4, to what is a gradient divided by 8",
    )


@pytest.mark.parametrize("name", ["cast", "copy_out", "reshard", "copy_out_again"])
def test_a_parameter_that_is_divided_is_found_where_it_is_used(name: str) -> None:
    finding = first(changed(fsdp2(), f"step/{name}", divisor=2))
    assert finding.operation in {"step/forward", "step/backward"}
    assert finding.why.endswith("which is a parameter divided by 2, not a parameter")


def test_a_parameter_is_no_gradient() -> None:
    source = View(buffer="shard", size=3)
    wrong = changed(fsdp2(), "step/widen", source=source)
    finding = the_finding(wrong, "value")
    assert finding.operation == "step/update"
    assert "wide, which is a parameter, not a gradient divided by 8" in finding.why


def test_a_gradient_is_no_parameter() -> None:
    schedule = without(deepspeed(), "step/wide/free")
    finding = first(changed(schedule, "step/cast", source=View(buffer="wide", size=4)))
    assert finding.operation == "step/forward"
    assert "flat, which is a gradient of a step before, not a parameter" in finding.why


@pytest.mark.parametrize(("runtime", "name"), [(deepspeed, "cast"), (megatron, "put")])
def test_parameters_are_not_added_to_those_of_the_step_before(
    runtime: Callable[[], Schedule], name: str
) -> None:
    (operation, why), *_ = found(changed(runtime(), f"step/{name}", accumulate=True), "value")
    assert operation == f"step/{name}"
    assert why.endswith("and parameters are no summands")
