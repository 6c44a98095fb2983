"""Bugs of real runtimes, planted in zsim's own schedules: each is found and named.

DS is deepspeedai/DeepSpeed, PT pytorch/pytorch, MLM NVIDIA/Megatron-LM; numbers are of issues.

Elsewhere: communicators in opposite orders (nccl 195, rccl 2191) in
`test_order_across_communicators`; overflow that stages handle differently, counters and
accumulators across a skip (DS 1599, 8415, 6550) in `test_values_of_branches` and `test_scalars`;
parameters without elements (DS 8297) in every drawn model.
What is not planted stands in docs/check.md with the reason.
"""

from collections.abc import Iterable, Mapping

import pytest
from faults.schedules import changed, edited, moved, split, twice, without

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import Finding, check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import (
    Action,
    Allocate,
    Compute,
    Copy,
    Free,
    FreeMode,
    Operand,
    Operation,
    Previous,
    Reduction,
    Role,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy

SHAPE = GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)


def zero(knobs: Mapping[str, object]) -> Schedule:
    """zsim's own schedule of a small GPT on four ranks."""
    strategy = Strategy.of({"parallel.data": 4, "train.optimizer": SGD(), **knobs})
    return make_schedule(
        gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision), strategy
    )


def operations(made: Schedule) -> Iterable[Operation]:
    return made.programs[0].by_id.values()


def first(made: Schedule, part: str) -> str:
    """The first operation with `part` in its id."""
    return next(each.id for each in operations(made) if part in each.id)


def by(invariant: str, made: Schedule) -> list[Finding]:
    return [each for each in check(made) if each.invariant == invariant]


def test_parameters_without_gradient_on_some_ranks() -> None:
    """PT 158719, 170667, 174862: some ranks reduce what others leave out."""
    made = zero({"zero.stage": 2})
    (found,) = by("matching", split(made, without(made, first(made, "/reduce/"))))
    assert found.role == "first and rest"


def test_a_rank_without_norm_work_that_skips_the_reduction_of_the_norm() -> None:
    """DS 1522: a stage with nothing to measure does not join the all-reduce of the norm."""
    made = zero({"zero.stage": 1, "train.clip_norm": 1.0})
    (found,) = by("matching", split(made, without(made, "step/update/norm/reduce")))
    assert found.operation == "step/update/norm/reduce"


def test_a_norm_that_is_not_reduced() -> None:
    """DS 7718: the norm of what one rank has, taken for the norm of all."""
    made = without(zero({"zero.stage": 2, "train.clip_norm": 1.0}), "step/update/norm/reduce")
    assert [each.operation for each in by("values", made)] == ["step/update/bucket0/update"]


def test_a_prefetched_parameter_that_is_never_used_and_never_freed() -> None:
    """DS 5828, 3156, 4808, 6557: gathered ahead of a branch that is not taken any more."""
    made = zero({"zero.stage": 3})
    gather = first(made, "/gather/")
    target = made.programs[0].by_id[gather]
    buffer = getattr(target, "target").buffer  # noqa: B009 (of an operation found by name)
    free = next(
        each.id for each in operations(made) if isinstance(each, Free) and each.buffer == buffer
    )
    found = by("lifetime", without(made, free))
    assert any(buffer in each.why for each in found)


def test_a_staging_buffer_that_is_freed_while_its_reduction_runs() -> None:
    """PT 179443, 180889: the block of a reduction in flight goes to the next layer."""
    made = zero({"zero.stage": 2, "zero.bucket_elements": 1})
    free = next(
        each
        for each in operations(made)
        if isinstance(each, Free) and each.buffer.endswith("/staging")
    )
    (found,) = by("lifetime", changed(made, free.id, uses=()))
    assert found.operation == free.id
    assert "may still use it" in found.why


def test_a_buffer_of_another_stream_than_its_consumer() -> None:
    """MLM 6187: the block may still be in use on the stream that it comes from."""
    made = zero({"zero.stage": 3, "zero.prefetch_units": 0})
    forward = next(
        each
        for each in operations(made)
        if isinstance(each, Compute) and each.action == "forward" and "block0" in each.id
    )
    found = by("lifetime", changed(made, forward.id, after=()))
    assert [each.operation for each in found] == [forward.id]
    assert found[0].why.startswith("reuse")


def test_a_reduction_that_is_silently_not_used() -> None:
    """DS 4946: the branch that reduces is never taken."""
    made = zero({"zero.stage": 2})
    reduce = first(made, "/reduce/")
    found = {each.invariant for each in check(without(made, reduce))}
    assert {"lifetime", "volume"} <= found


def test_accumulation_that_saves_no_communication() -> None:
    """Torchtune 1275, torchtitan 1929: reduced in each micro-batch after all."""
    knobs = {"zero.stage": 2, "train.gradient_accumulation_steps": 3}
    once, each_time = (
        zero(knobs | {"zero.reduce_once": True}),
        zero(knobs | {"zero.reduce_once": False}),
    )
    broken = replace(each_time, contract=replace(once.contract, peak_bytes=()))
    (found,) = by("volume", broken)
    assert found.operation == "data/reduce_scatter"


def test_a_gather_of_what_is_gathered_already() -> None:
    """PT 144800, MLM 6153: recompute triggers the prefetch of forward a second time."""
    made = zero({"zero.stage": 3})
    (found,) = by("volume", twice(made, first(made, "/gather/")))
    assert found.operation == "data/all_gather"


def test_weights_that_are_freed_before_backward_reads_them() -> None:
    """DS 8036, 8059: a compiler pass frees them after their last use in forward."""
    made = zero({"zero.stage": 3})
    backward = next(
        each for each in operations(made) if isinstance(each, Compute) and each.action == "backward"
    )
    weight = next(each.view.buffer for each in backward.operands if each.role is Role.PARAMETER)
    frees = [
        each.id for each in operations(made) if isinstance(each, Free) and each.buffer == weight
    ]
    found = by("lifetime", moved(made, frees[-1], before=backward.id))
    assert found[0].operation == backward.id
    assert "after it was freed" in found[0].why


def test_gradients_of_several_steps_on_top_of_each_other() -> None:
    """PT 139234: gradient memory of a step is still held when the next one begins."""
    made = zero({"zero.stage": 1})
    free = next(
        each.id
        for each in operations(made)
        if isinstance(each, Free) and each.buffer.endswith("/gradient") and "update" in each.id
    )
    (found,) = by("lifetime", without(made, free))
    assert "alive when step ends" in found.why


def test_a_cast_of_updated_parameters_that_is_left_out_of_the_gather() -> None:
    """DS 7606: a copy of the parameters goes stale after the update."""
    made = zero({"zero.stage": 1, "train.precision": Precision.BF16})
    gather = next(
        name
        for name in made.programs[0].by_id
        if name.startswith("step/update") and "/gather" in name
    )
    (found,) = by("values", without(made, gather))
    assert found.operation == "step/update/bucket0/cast"
    assert "in bucket0/parameter" in found.why


@pytest.mark.matrix(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_optimizers_of_which_one_takes_the_other_ones_gradients(stage: int) -> None:
    """MLM 4769: they share a buffer, and the second one reads what is not its own."""
    made = zero({"zero.stage": stage, "zero.bucket_elements": 1})
    updates = [
        each for each in operations(made) if isinstance(each, Compute) and each.action == "update"
    ]
    one, other = next(
        (one, other)
        for one in updates
        for other in updates
        if one is not other and one.operands[0].view.size == other.operands[0].view.size
    )
    wrong = replace(one, operands=(other.operands[0], *one.operands[1:]))
    (found,) = by("values", edited(made, lambda each: (wrong if each.id == wrong.id else each,)))
    assert found.operation == one.id


@pytest.mark.one_commit_in(4)
def test_what_is_planted_is_not_there_before() -> None:
    for stage in range(4):
        assert (
            check(zero({"zero.stage": stage, "train.clip_norm": 1.0, "zero.bucket_elements": 1}))
            == ()
        )


def test_a_contribution_that_is_added_to_what_the_step_before_left() -> None:
    """DS 6550, 7967: the first micro-batch adds instead of setting."""
    made = zero({"zero.stage": 2})
    copy = next(each for each in operations(made) if isinstance(each, Copy) and not each.accumulate)
    found = by("values", changed(made, copy.id, accumulate=True))
    assert (found[0].operation, found[0].why.split()[0]) == (copy.id, "computes")


def test_memory_that_nobody_promised() -> None:
    """DS 2869: a knob that is documented to bound memory does not."""
    made = zero({"zero.stage": 3, "zero.prefetch_units": 0})
    eager = zero({"zero.stage": 3, "zero.prefetch_units": 3})
    broken = replace(eager, contract=made.contract)
    (found,) = by("memory", broken)
    assert isinstance(made.programs[0].by_id.get(found.operation), Allocate | None)
    assert "promised are at most" in found.why


def test_a_parameter_that_is_fetched_twice_at_once() -> None:
    """DS 7824: hooks of two outputs fire, and two gathers write one buffer."""
    made = zero({"zero.stage": 3})
    gather = first(made, "/gather/")
    found = by("races", twice(made, gather, stream="compute", group="world"))
    assert found[0].operation == f"{gather}/again"
    assert f"while {gather} may still write it" in found[0].why


def test_overlapped_communication_that_reduces_what_is_not_there_yet() -> None:
    """DS 5545: the reduction is on a stream of its own, and does not wait for the gradients."""
    made = zero({"zero.stage": 2})
    reduce = first(made, "/reduce/")
    found = by("races", changed(made, reduce, after=()))
    assert found[0].operation == reduce
    assert "may still write it" in found[0].why


def test_padding_that_nothing_wrote_reaches_a_reduction() -> None:
    """DS 6659: the padding of a tiny parameter is what was in memory before."""
    made = zero({"zero.stage": 3, "parallel.data": 5})
    fill = first(made, "/pad/")
    reduction = getattr(made.programs[0].by_id[fill], "target").buffer  # noqa: B009 (found by name)
    found = by("values", without(made, fill))
    assert "/reduce/" in found[0].operation
    assert f"computes with {reduction}" in found[0].why


def test_a_reduce_buffer_that_is_held_for_every_layer() -> None:
    """PT 179443, the other way round: as many buffers at once as there are layers."""
    knobs = {"zero.stage": 2, "zero.bucket_elements": 1}
    made, held = zero(knobs), zero(knobs | {"zero.reductions_in_flight": 20})
    (found,) = by("memory", replace(held, contract=made.contract))
    assert "promised are at most" in found.why


def test_gathers_without_a_limit() -> None:
    """PT 83917, 94429: nothing keeps the host from issuing the gathers of all layers."""
    made = zero({"zero.stage": 3})

    def edit(operation: Operation) -> Iterable[Operation]:
        if isinstance(operation, Free) and operation.buffer.endswith("gathered"):
            return (replace(operation, mode=FreeMode.DEFERRED),)
        return (operation,)

    (found,) = by("memory", edited(made, edit))
    assert "may hold more with every step" in found.why
    assert any("nothing has made the host wait for its uses" in line for line in found.witness)


def test_a_double_buffer_that_is_filled_while_its_reduction_still_reads() -> None:
    """MLM 5222: the second layer on writes what the first one's reduction reads."""
    build = ScheduleBuilder.of("double buffer", data=2)
    build.group("data", "data")
    made = build.buffer("made", 4, persistent=True)
    halves = [build.buffer(f"half{number}", 4, persistent=True) for number in range(2)]
    parts = [build.buffer(f"part{number}", 2, persistent=True) for number in range(3)]
    build.setup.allocate(made, *halves, *parts)
    build.setup.fill("made", made.all, 0.0)
    reduced = ""
    for layer in range(3):
        half = halves[layer % 2]
        before = [Previous("step/reduce1"), Previous("step/reduce2")] if layer == 0 else []
        copied = build.step.copy(f"copy{layer}", made.all, half.all, after=before)
        reduced = build.step.reduce_scatter(
            f"reduce{layer}", "data", half.all, parts[layer].all, after=[copied]
        )
    build.step.host_wait("wait", reduced)
    (found,) = by("races", build.schedule())
    assert found.operation == "step/copy2"
    assert found.why == "writes half0 while step/reduce0 may still read it"


def test_an_optimizer_that_leaves_a_bucket_out() -> None:
    """DS 7606: what is not updated any more drifts from what is."""
    made = zero({"zero.stage": 1, "zero.bucket_elements": 1})
    update = next(
        each.id for each in operations(made) if isinstance(each, Compute) and each.rule is not None
    )
    found = by("lifetime", without(made, update))
    assert found[0].operation == "step/update/bucket0/free/bucket0/gradient"


def test_experts_that_no_token_of_a_rank_goes_to() -> None:
    """DS 5008, 4966, 7461: their parameters are gathered by the other ranks alone."""
    made = zero({"zero.stage": 3})
    gather = first(made, "/gather/")
    (found,) = by("matching", split(made, without(made, gather)))
    assert found.operation == gather


def accumulated(made: Schedule) -> list[Copy]:
    """What is added to gradients after the first micro-batch."""
    return [each for each in operations(made) if isinstance(each, Copy) and each.accumulate]


def test_micro_steps_after_the_first_that_are_dropped() -> None:
    """DS 6550, 7981, 671: the counter of micro-steps is off by one."""
    made = zero({"zero.stage": 2, "train.gradient_accumulation_steps": 3})
    dropped = [each.id for each in accumulated(made) if "mb1" in each.id]
    (found,) = by("values", without(made, *dropped))
    assert found.operation == "step/update/bucket0/update"


def test_a_boundary_that_resets_the_accumulator() -> None:
    """DS 7967, 545; open-instruct 1498: the last micro-step sets what it should add to."""
    made = zero({"zero.stage": 2, "train.gradient_accumulation_steps": 3})
    last = next(each.id for each in accumulated(made) if "mb2" in each.id)
    (found,) = by("values", changed(made, last, accumulate=False))
    assert found.operation == "step/update/bucket0/update"


def test_a_norm_that_is_too_small_by_a_factor() -> None:
    """DS 7718: ranks average what they should sum."""
    made = zero({"zero.stage": 2, "train.clip_norm": 1.0})
    wrong = changed(made, "step/update/norm/reduce", reduction=Reduction.AVERAGE)
    (found,) = by("values", wrong)
    assert found.operation == "step/update/bucket0/update"


def test_a_secondary_shard_that_is_not_refreshed() -> None:
    """DS 4851, 7606: backward gathers from a copy that is kept, and that updates leave behind."""
    made, name = zero({"zero.stage": 3, "zero.secondary": 2}), "bucket0/secondary"
    (program,) = made.programs
    view = program.by_name[name]
    kept = Compute(
        id="setup/initialize/secondary",
        stream="compute",
        action=Action.INITIALIZE,
        operands=(Operand(role=Role.PARAMETER, view=View(buffer=name, size=view.elements)),),
    )
    own = [
        each.id
        for each in operations(made)
        if (isinstance(each, Allocate | Free) and each.buffer == name)
        or (isinstance(each, Copy) and each.target.buffer == name)
    ]
    allocate = Allocate(id="setup/allocate/secondary", buffer=name)
    (once,) = without(made, *own).programs
    stale = replace(once, persistent=(*once.persistent, name), setup=(*once.setup, allocate, kept))
    (found,) = by("values", replace(made, programs=(stale,)))
    assert f"in {name}" in found.why


def test_gradients_that_a_second_instance_of_the_optimizer_divides_again() -> None:
    """MLM 3693: with overlap and several instances less is applied than without."""
    made = zero({"zero.stage": 2})
    copy = next(each for each in operations(made) if isinstance(each, Copy) and each.divisor > 1)
    found = by("values", changed(made, copy.id, divisor=2 * copy.divisor))
    assert [each.operation.rsplit("/", 1)[1] for each in found] == ["update"]


def test_a_norm_that_is_never_measured() -> None:
    """CAI 4984: clipping reads a number that nobody has computed."""
    made = zero({"zero.stage": 2, "train.clip_norm": 1.0})
    (found,) = by("lifetime", without(made, "step/update/norm/measure"))
    assert found.operation == "step/update/norm/reduce"
    assert "unordered" in found.why
