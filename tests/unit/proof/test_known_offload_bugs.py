"""Bugs of runtimes that offload, planted in schedules that do: each is found, each mended is clean.

DS is deepspeedai/DeepSpeed, PT pytorch/pytorch, MLM NVIDIA/Megatron-LM; numbers are of issues.
Every schedule that a bug is planted in is the mended version, and is proved below.

A schedule cannot express these:
- time: a test for infinities that is slow on the CPU (DS 4561), pageable memory that copies slower
  (DS 5301), ranks whose links work in turn (DS 1067): all values and orders are right;
- configuration: a ratio that is rounded to whole sub-groups (Megatron-DeepSpeed 311);
- the process: file descriptors that stay open (DS 8075), pinning that the machine refuses (DS 7150,
  DS 2977, PT 157146);
- the allocator: pinned memory rounded up to powers of two (PT 95823, vLLM 48436 and 53042), which
  `[host] pinned` simulates.
"""

from collections.abc import Callable, Iterable
from functools import cache

import pytest
from faults.schedules import changed, edited, moved, twice, without

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    SetScalar,
    View,
    Write,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Kind, Pool, Schedule, ScheduleError
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)


@cache
def of(*said: tuple[str, object]) -> tuple[Schedule, Model]:
    """The schedule of a small GPT on two ranks, and the model."""
    strategy = Strategy.of({"parallel.data": 2, **dict(said)})
    model = gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision)
    return make_schedule(model, strategy), model


def own(stage: int, **said: object) -> Schedule:
    """One of zsim's own stages, with keys that have `__` for the dot."""
    keys = tuple((name.replace("__", "."), value) for name, value in said.items())
    return of(("zero.stage", stage), *keys)[0]


def deepspeed(stage: int, micro_batches: int = 1, **said: object) -> Schedule:
    """A stage of DeepSpeed with its optimizer on the CPU."""
    options = {"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 30_000, **said}
    return of(
        ("zero.stage", stage),
        ("zero.emulate", DeepSpeed.model_validate(options)),
        ("train.gradient_accumulation_steps", micro_batches),
    )[0]


def fsdp2(micro_batches: int = 1, clip: float | None = None) -> Schedule:
    """FSDP2 with CPUOffloadPolicy."""
    return of(
        ("zero.stage", 3),
        ("zero.emulate", FSDP2(offload_policy=OffloadPolicy.CPU)),
        ("train.gradient_accumulation_steps", micro_batches),
        ("train.clip_norm", clip),
    )[0]


def operations(made: Schedule) -> Iterable[Operation]:
    return walk(made.programs[0].step)


def names(made: Schedule, part: str) -> list[str]:
    """Operations of a step with `part` in their id, less allocations."""
    return [each.id for each in operations(made) if part in each.id and type(each) is not Allocate]


def first(made: Schedule, part: str) -> str:
    return names(made, part)[0]


def found(made: Schedule) -> set[str]:
    """Invariants that are broken."""
    return {each.invariant for each in check(made)}


def freed_without(made: Schedule, part: str) -> Schedule:
    """The schedule in which frees with `part` in their id wait for nobody."""
    return edited(
        made,
        lambda each: (replace(each, uses=()) if type(each) is Free and part in each.id else each,),
    )


def with_buffer(
    made: Schedule, buffer: Buffer, *others: Operation, setup: bool = False
) -> Schedule:
    """The schedule with another buffer, and with operations before its step or in setup."""
    (program,) = made.programs
    buffers = (*program.buffers, buffer)
    if setup:
        program = replace(
            program,
            buffers=buffers,
            setup=(*program.setup, *others),
            persistent=(*program.persistent, buffer.name),
        )
    else:
        program = replace(program, buffers=buffers, step=(*others, *program.step))
    return replace(made, programs=(program,))


MENDED: list[Callable[[], Schedule]] = [
    lambda: own(2, offload__optimizer="host", train__precision="bf16"),
    lambda: own(2, offload__optimizer="host", train__precision="fp16"),
    lambda: own(2, offload__optimizer="nvme", offload__sub_group_elements=40),
    lambda: own(3, offload__optimizer="nvme", offload__parameters="nvme"),
    lambda: own(2, activations__checkpointing="full", offload__checkpoints="host"),
    lambda: deepspeed(2),
    lambda: deepspeed(2, 2),
    lambda: deepspeed(3, sub_group_size=20),
    lambda: fsdp2(2, clip=1.0),
]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("number", range(len(MENDED)))
def test_the_mended_versions_are_clean(number: int) -> None:
    assert check(MENDED[number]()) == ()


def test_gradients_that_leave_on_a_stream_of_their_own_race_with_the_next_reduction() -> None:
    """DS 1219: the copy of a bucket's gradients, and what takes its memory next."""
    made = deepspeed(2, reduce_bucket_size=60)
    made = replace(made, streams=(*made.streams, "copy_grad"))
    apart = edited(
        made,
        lambda each: (
            replace(each, stream="copy_grad", after=(first(made, "/reduce0"),))
            if type(each) is Copy and "/offload/" in each.id
            else each,
        ),
    )
    assert found(apart) & {"lifetime", "races"}
    # the branch of ZeRO-Offload's first author, which waited at the end of backward alone
    apart = deepspeed(2, reduce_bucket_size=60, migration_stream=True)
    assert found(apart) == set()
    assert found(freed_without(apart, "/free/flat")) & {"lifetime", "races"}


def test_parameters_that_are_gathered_while_they_are_still_copied_to_the_device() -> None:
    """DS 3097: Python did not wait for copies that CPU Adam had begun tile by tile."""
    made = own(2, offload__optimizer="host", train__precision="bf16")
    assert "races" in found(changed(made, "step/update/bucket0/gather", after=()))


def test_accumulation_that_keeps_the_first_micro_batch_alone() -> None:
    """DS 6550, 7967: later gradients are dropped."""
    made = deepspeed(2, 2)
    add = first(made, "mb1/end/add/")
    assert found(changed(made, add, accumulate=False)) == {"values"}


def test_a_boundary_that_overwrites_the_sum_with_the_last_gradient() -> None:
    """DS 7981: several backwards in one step."""
    made = deepspeed(2, 2)
    assert found(without(made, first(made, "mb1/end/add/"))) == {"values"}


def test_a_norm_that_is_looked_up_and_was_never_measured() -> None:
    """DS 671: with accumulation, only the boundary records it."""
    made = deepspeed(2, 2)
    assert found(without(made, first(made, "/norm_part"))) & {"values", "lifetime"}


def test_a_step_counter_that_every_sub_group_advances() -> None:
    """DS 7819, 7982: bias correction differs between sub-groups of one step."""
    made = deepspeed(3, sub_group_size=20)
    (count,) = (each.id for each in operations(made) if isinstance(each, SetScalar))
    again = moved(twice(made, count), f"{count}/again", before="step/update/sub_group1/update")
    assert "scalars" in found(again)


def test_a_step_counter_that_does_not_go_on_after_a_resume() -> None:
    """SkyRL 1403: the optimizer's counter is stale."""
    made = own(2, offload__optimizer="host", train__precision="bf16")
    (count,) = (each.id for each in operations(made) if isinstance(each, SetScalar))
    assert "scalars" in found(without(made, count))


def test_states_on_nvme_that_do_not_come_back() -> None:
    """DS 2272: on NVMe it learns slower than on the CPU."""
    made = own(2, offload__optimizer="nvme", offload__sub_group_elements=40)
    assert "values" in found(without(made, first(made, "/write/1")))


def test_a_file_that_loses_its_tail() -> None:
    """DS 1070, 2006, 3376: a length that does not divide over the I/O threads."""
    made = own(2, offload__optimizer="nvme", offload__sub_group_elements=40)
    write = made.programs[0].by_id[first(made, "/write/1")]
    assert isinstance(write, Write)
    cut = {
        side: replace(view, size=view.size - 1)
        for side, view in (("source", write.source), ("target", write.target))
    }
    assert {"values", "volume"} <= found(changed(made, write.id, **cut))


def with_slots(made: Schedule, pool: str, *, size: int = 0, fewer: int = 0) -> Schedule:
    """The schedule with slots of another size, or with fewer of them."""

    def other(each: Pool) -> Pool:
        assert each.slot_bytes is not None
        assert each.capacity_bytes is not None
        slot = size or each.slot_bytes
        capacity = each.capacity_bytes // each.slot_bytes * slot - fewer * slot
        return replace(each, slot_bytes=slot, capacity_bytes=capacity)

    pools = tuple(other(each) if each.name == pool else each for each in made.pools)
    return replace(made, pools=pools)


def test_a_prefetch_that_takes_the_slot_of_the_next_demand() -> None:
    """DS 3062, Megatron-DeepSpeed 196: an assertion instead of parameters."""
    made = own(3, offload__optimizer="nvme", offload__parameters="nvme")
    one_less = with_slots(made, "parameter_slots", fewer=1)
    assert any("its capacity is" in each.why for each in check(one_less))


def test_a_shard_that_is_larger_than_a_slot() -> None:
    """DS 3506: refused before anything is proved."""
    made = own(3, offload__optimizer="nvme", offload__parameters="nvme")
    with pytest.raises(ScheduleError, match="a slot of pool parameter_slots has"):
        with_slots(made, "parameter_slots", size=8)


def test_a_gradient_that_crosses_the_link_once_more() -> None:
    """DS 4113: out, back for its norm, out in fp32; what is promised is compared."""
    made = own(2, offload__optimizer="host", train__precision="bf16")
    again = twice(made, first(made, "/offload/bucket0"))
    (why,) = (each.why for each in check(again) if each.invariant == "volume")
    assert "bytes to host, promised are" in why


def more_memory(made: Schedule, pool: str, elements: int, *, setup: bool) -> Schedule:
    """The schedule with a buffer more, in setup or through its step."""
    (program,) = made.programs
    like = next(
        each for each in program.buffers if each.pool == pool and each.name in program.persistent
    )
    buffer = replace(
        like, name="more", elements=elements, kind=Kind.WORKSPACE, layout=None, shard=None
    )
    part = "setup" if setup else "step"
    others: list[Operation] = [Allocate(id=f"{part}/allocate/more", buffer="more")]
    if setup:
        target = View(buffer="more", size=elements)
        others.append(Fill(id="setup/more", stream=like.home, target=target, value=0.0))
        return with_buffer(made, buffer, *others, setup=True)
    others.append(Free(id="step/free/more", buffer="more"))
    return with_buffer(made, buffer, *others)


def total(made: Schedule) -> int:
    return 4 * sum(layout.elements for layout in made.layouts)


@pytest.mark.parametrize("setup", [False, True])
@pytest.mark.parametrize("pool", ["device", "host"])
def test_memory_beyond_the_promise(pool: str, *, setup: bool) -> None:
    """DS 7250 and 7307 (fp32 on the device), 7693 and MLM 7232 (the host), DS 467 (buckets)."""
    made = own(2, offload__optimizer="host", train__precision="bf16")
    assert "memory" in found(more_memory(made, pool, 8 * total(made), setup=setup))


def test_an_update_that_begins_before_its_gradient_has_arrived() -> None:
    """DS 7905, 7906: CPU Adam starts beside the copy."""
    made = own(2, offload__optimizer="host", train__precision="bf16")
    assert "races" in found(changed(made, "step/update/bucket0/widen", after=()))


def test_a_sub_group_that_is_lost_when_groups_are_cut() -> None:
    """DS 7906: what is left over is not updated."""
    made = deepspeed(3, sub_group_size=20)
    assert "values" in found(without(made, "step/update/sub_group1/update"))


def test_an_update_of_gradients_that_are_not_unscaled_yet() -> None:
    """DS `superoffload_stage3.py`: CPU Adam during backward, with a loss scale other than 1."""
    made = own(2, offload__optimizer="host", train__precision="fp16")
    assert "values" in found(without(made, "step/update/bucket0/unscale"))


def test_a_gradient_that_is_read_in_pinned_memory_before_its_copy_is_done() -> None:
    """PT 180666: a hook, or the sum of micro-batches, runs on the CPU at once."""
    made = fsdp2(2, clip=1.0)
    add = first(made, "/add/")
    waits = [
        each.id
        for each in operations(made)
        if isinstance(each, HostWait) and "offload" in each.id and "backward/mb1" in each.id
    ]
    assert "races" in found(without(changed(made, add, after=()), *waits))


def test_a_norm_of_the_host_that_is_reduced_by_the_device() -> None:
    """PT 148532: NCCL cannot reduce a number that is in the host's memory."""
    made = fsdp2(2, clip=1.0)
    (reduce,) = (
        each.id for each in operations(made) if isinstance(each, AllReduce) and "norm" in each.id
    )
    number = View(buffer="norm/host", size=1)
    assert "places" in found(changed(made, reduce, source=number, target=number))


def test_a_gradient_whose_memory_is_used_again_while_it_is_copied_out() -> None:
    """Fairscale 496: asynchronous copies gave wrong results, and were made blocking."""
    made = own(2, offload__optimizer="host", train__precision="bf16")
    freed = [
        each
        for each in operations(made)
        if isinstance(each, Free) and first(made, "/offload/bucket0") in each.uses
    ]
    assert freed
    assert "lifetime" in found(freed_without(made, freed[0].id))


def test_an_activation_that_is_freed_while_its_copy_still_reads_it() -> None:
    """Torchtune 1867: gradients become NaN."""
    made = own(2, activations__checkpointing="full", offload__checkpoints="host")
    copied = first(made, "/offload/")
    freed = [each for each in operations(made) if isinstance(each, Free) and copied in each.uses]
    assert freed
    assert "lifetime" in found(freed_without(made, freed[0].id))


def test_a_slab_that_is_overwritten_while_a_copy_to_the_device_reads_it() -> None:
    """Torchtitan 2581: a stream that waits for itself waits for nobody."""
    made = own(3, offload__optimizer="nvme", offload__parameters="nvme")
    assert "lifetime" in found(freed_without(made, "/slot"))


def test_a_reload_of_what_is_still_on_its_way_out() -> None:
    """MLM 7398: a copy to the device reads the buffer that another one fills."""
    made = own(2, activations__checkpointing="full", offload__checkpoints="host")
    back = first(made, "/fetch/")
    assert found(changed(made, back, after=())) & {"races", "lifetime"}


def test_masters_that_are_not_those_of_the_parameters() -> None:
    """MLM 5071: weights are loaded, and the first step undoes it."""
    made = own(2, offload__optimizer="host", train__precision="bf16")

    def stale(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Compute) and each.action is Action.INITIALIZE and "master" in each.id:
            (operand,) = each.operands
            return (Fill(id=each.id, stream=each.stream, target=operand.view, value=0.0),)
        return (each,)

    assert "values" in found(edited(made, stale))


def test_states_on_the_host_that_the_device_updates() -> None:
    """CAI 6388: an Adam of the GPU is given what was moved to the CPU."""
    made = own(2, offload__optimizer="host", train__precision="bf16")
    assert found(replace(made, host_threads=())) == {"places"}
