import pytest
from faults.schedules import hand

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import Finding, check
from zsim.runtimes.registry import make_schedule as zero
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import FreeMode, Previous
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Pool, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed


def memory(schedule: Schedule) -> list[Finding]:
    return [each for each in check(schedule) if each.invariant == "memory"]


def promising(schedule: Schedule, peak: int) -> list[Finding]:
    contract = replace(schedule.contract, peak_bytes=(("all", "device", peak),))
    return memory(replace(schedule, contract=contract))


def two_buffers(mode: FreeMode, *, waits: str = "") -> Schedule:
    """Two buffers of 16 bytes one after the other; the host may wait for the use of each."""
    build = ScheduleBuilder.of("books", data=1)
    x, y = build.buffer("x", 4), build.buffer("y", 4)
    for buffer in (x, y):
        build.step.allocate(buffer)
        used = build.step.fill(f"{buffer.name}/fill", buffer.all, 0.0)
        build.step.free(buffer, mode=mode, uses=[used])
        if waits == "at once":
            build.step.host_wait(f"{buffer.name}/wait", used)
        if waits == "a step later":
            build.step.host_wait(f"{buffer.name}/wait", Previous(used))
    return build.schedule()


def test_nothing_promised_is_nothing_examined() -> None:
    assert memory(two_buffers(FreeMode.DEFERRED)) == []


@pytest.mark.parametrize("mode", [FreeMode.WAITED, FreeMode.HOST])
def test_more_memory_than_promised_is_found_where_it_is_taken(mode: FreeMode) -> None:
    schedule = two_buffers(mode)
    assert promising(schedule, 16) == []
    assert promising(schedule, 17) == []
    (found,) = promising(schedule, 15)
    assert found.operation == "step/x/allocate"
    assert found.why == "pool device may hold 16 bytes, promised are at most 15"
    assert found.witness == (
        "step/x/allocate brings it to 16 bytes",
        "alive: x, 16 bytes",
    )


def test_a_deferred_free_that_no_wait_of_the_host_follows_lets_memory_grow() -> None:
    (found,) = promising(two_buffers(FreeMode.DEFERRED), 10**9)
    assert found.why == (
        "pool device may hold more with every step, promised are at most 1000000000"
    )
    assert "freed by step/x/free, and nothing has made the host wait for its uses" in found.witness


def test_a_deferred_free_comes_back_at_the_first_allocation_behind_a_wait_of_the_host() -> None:
    # The host waits for the fill of x before it allocates y, and for that of y before x: 16 bytes.
    assert promising(two_buffers(FreeMode.DEFERRED, waits="at once"), 16) == []
    # It waits one step later. When x is allocated in step k, x and y of step k - 1 are not back; of
    # step k - 2, x was waited for in step k - 1, and so was y: 3 x 16 bytes. When y is allocated,
    # the host has waited for x of step k - 1: y of that step, x and y of this one.
    late = two_buffers(FreeMode.DEFERRED, waits="a step later")
    assert promising(late, 48) == []
    (found,) = promising(late, 47)
    assert found.witness[1:] == (
        "alive: x, 16 bytes",
        "freed by step/x/free, and nothing has made the host wait for its uses",
        "freed by step/y/free, and nothing has made the host wait for its uses",
    )


def test_both_lists_of_a_branch_count() -> None:
    build = ScheduleBuilder.of("branch", data=1)
    flag, x = build.buffer("flag", 1, persistent=True), build.buffer("x", 4)
    build.setup.allocate(flag)
    build.setup.fill("zero", flag.all, 0.0)
    then, otherwise = build.step.side("yes"), build.step.side("no")
    then.allocate(x)
    then.fill("x", x.all, 0.0)
    then.free(x)
    build.step.branch("branch", flag.all, then, otherwise, after=[])
    # flag is 4 bytes, x is 16.
    assert promising(build.schedule(), 20) == []
    assert [each.operation for each in promising(build.schedule(), 19)] == ["step/yes/x/allocate"]


def test_a_pool_with_a_capacity_is_not_exceeded() -> None:
    pools = (Pool(name="device", capacity_bytes=15),)
    (found,) = memory(replace(two_buffers(FreeMode.WAITED), pools=pools))
    assert found.why == "pool device may hold 16 bytes, its capacity is 15"


def test_a_doubled_buffer_is_seen_though_it_is_far_from_the_peak() -> None:
    schedule = hand()
    (program,) = schedule.programs
    assert memory(schedule) == []
    for name in ("batch", "layer0/saved", "layer0/slope", "seed", "loss/gradient"):
        buffers = tuple(
            replace(buffer, elements=2 * buffer.elements) if buffer.name == name else buffer
            for buffer in program.buffers
        )
        (found,) = memory(replace(schedule, programs=(replace(program, buffers=buffers),)))
        assert found.operation.endswith(f"{name}/allocate")
        assert f"takes memory for {name} that nothing uses" in found.why


def test_a_staging_buffer_may_have_room() -> None:
    """DeepSpeed's buckets have a fixed size, whatever comes to lie in them."""
    schedule = hand()
    (program,) = schedule.programs
    buffers = tuple(
        replace(buffer, elements=2 * buffer.elements) if "staging" in buffer.name else buffer
        for buffer in program.buffers
    )
    assert memory(replace(schedule, programs=(replace(program, buffers=buffers),))) == []


def test_model_states_are_those_that_the_closed_form_says() -> None:
    shape = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)
    model = gpt(shape, micro_batch_size=1, precision=Precision.BF16)
    strategy = Strategy(
        parallel=Parallel(data=3), zero=Zero(stage=1), train=Train(precision=Precision.BF16)
    )
    schedule = zero(model, strategy)
    (program,) = schedule.programs
    moment = next(name for name in program.persistent if program.by_name[name].kind is Kind.MOMENT)
    fewer = replace(
        program, persistent=tuple(each for each in program.persistent if each != moment)
    )
    found = [
        each
        for each in check(replace(schedule, programs=(fewer,)), model)
        if each.invariant == "memory"
    ]
    assert [each.operation for each in found] == ["persistent/moment"]


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.MASTER])
def test_a_moment_that_is_called_another_kind_is_found(kind: Kind) -> None:
    """States are read back by kind: a moment would be taken for parameters."""
    shape = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)
    model = gpt(shape, micro_batch_size=1, precision=Precision.BF16)
    made = zero(
        model,
        Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=2, emulate=DeepSpeed()),
            train=Train(precision=Precision.BF16),
        ),
    )
    (program,) = made.programs
    (name, *_) = (each.name for each in program.buffers if each.kind is Kind.MOMENT)
    buffers = tuple(
        replace(each, kind=kind) if each.name == name else each for each in program.buffers
    )
    (found,) = memory(replace(made, programs=(replace(program, buffers=buffers),)))
    assert found.why == f"uses {name} as moment, whose kind is {kind}"
