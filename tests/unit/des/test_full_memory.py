"""Memory that is full: hosts wait for it, steps take longer, and only then a run fails."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from drawn_clusters import NO_MODEL
from drawn_emulated import emulated_jobs, pipelined_jobs
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.analysis.memory_footprint import certain_footprint
from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.cluster.profile.host_launch import LaunchCosts
from zsim.dtype import DType
from zsim.memory import WorstCase, handed_out, memory_ledger, needed_bytes, peak_bytes
from zsim.model.model import Model
from zsim.proof import against_trace
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import COMMUNICATION, COMPUTE, ScheduleBuilder
from zsim.schedule.operation import FreeMode, View
from zsim.schedule.schedule import Discipline, Pool, Schedule
from zsim.strategy.strategy import Strategy
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_des.engine import worst_case
from zsim_runtimes.fsdp1.options import FSDP1

MIB = 2**20
LARGE = 10**15
RATES = tuple(Rate(dtype=d, peak=10**12, matmul=10**12, elementwise=10**12) for d in DType)


def cluster(
    memory_bytes: int, *, launch_ps: int = 0, share: Fraction = Fraction(0), ranks: int = 8
) -> Cluster:
    """One node. A byte takes 1 ps to copy, and 10 ps from GPU to GPU."""
    return Cluster(
        name="one node",
        nodes=1,
        gpus_per_node=ranks,
        gpu=Gpu(
            name="any",
            memory_bytes=memory_bytes,
            memory_bytes_per_s=10**12,
            rates=RATES,
            launch=LaunchCosts(operation_ps=launch_ps),
            collective_share=share,
        ),
        switch_link=Link(bytes_per_s=10**11),
        nics_per_node=ranks,
        nic_link=Link(bytes_per_s=10**11),
    )


def run(schedule: Schedule, on: Cluster, steps: int = 1, model: Model = NO_MODEL) -> Trace:
    job = Job(schedule=schedule, model=model, cluster=on, steps=steps)
    return SimBackend().run(job, seed=0)


def two_buffers(discipline: Discipline, mib: int) -> Schedule:
    """One that another stream copies, its free deferred; then another one, for compute."""
    build = ScheduleBuilder.of("two", data=1)
    build.pools = [Pool(name="device", discipline=discipline)]
    kept = build.buffer("kept", mib * MIB // 4, persistent=True, home=COMPUTE)
    first = build.buffer("first", mib * MIB // 4, home=COMPUTE)
    second = build.buffer("second", mib * MIB // 4, home=COMPUTE)
    build.setup.allocate(kept)
    build.setup.fill("zero", kept.all, 0.0)
    build.step.allocate(first)
    build.step.fill("written", first.all, 0.0)
    used = build.step.copy(
        "used", first.all, kept.all, stream=COMMUNICATION, after=["step/written"]
    )
    build.step.free(first, mode=FreeMode.DEFERRED, uses=[used])
    build.step.allocate(second)
    build.step.fill("next", second.all, 0.0)
    build.step.free(second)
    return build.schedule()


@pytest.mark.parametrize("discipline", Discipline)
def test_a_host_waits_for_the_uses_of_what_it_freed_when_there_is_no_other_memory(
    discipline: Discipline,
) -> None:
    schedule = two_buffers(discipline, 40)
    wide = run(schedule, cluster(120 * MIB))
    # A copy reads and writes 40 MiB, a fill writes as much, at 1 ps a byte.
    assert spans(wide)["step/next"][0] == 40 * MIB
    narrow = run(schedule, cluster(80 * MIB))
    assert spans(narrow)["step/next"][0] == spans(narrow)["step/used"][1] == 120 * MIB
    assert narrow.ranks[0].memory_wait_ps == (120 * MIB,)
    assert wide.ranks[0].memory_wait_ps == ()
    (found,) = narrow.ranks[0].reservations
    assert (found.waits, found.peak_bytes, found.shortage) == (1, 80 * MIB, None)
    assert run(schedule, cluster(79 * MIB)).out_of_memory is not None


def test_where_memory_is_exact_a_host_waits_for_no_more_uses_than_make_room() -> None:
    build = ScheduleBuilder.of("oldest", data=1)
    build.pools = [Pool(name="device", discipline=Discipline.EXACT)]
    kept = build.buffer("kept", 10 * MIB // 4, persistent=True, home=COMPUTE)
    build.setup.allocate(kept)
    build.setup.fill("zero", kept.all, 0.0)
    for name in ("first", "second"):
        given = build.buffer(name, 10 * MIB // 4, home=COMPUTE)
        build.step.allocate(given)
        build.step.fill(f"{name}/written", given.all, 0.0)
        used = build.step.copy(
            f"{name}/used",
            given.all,
            kept.all,
            stream=COMMUNICATION,
            after=[f"step/{name}/written"],
        )
        build.step.free(given, mode=FreeMode.DEFERRED, uses=[used])
    third = build.buffer("third", 10 * MIB // 4, home=COMPUTE)
    build.step.allocate(third)
    build.step.fill("next", third.all, 0.0)
    build.step.free(third)
    found = spans(run(build.schedule(), cluster(30 * MIB)))
    assert found["step/first/used"][1] == 30 * MIB < found["step/second/used"][1]
    assert found["step/next"][0] == 30 * MIB


def spans(trace: Trace) -> dict[str, tuple[int, int]]:
    return {each.operation: (each.start_ps, each.end_ps) for each in trace.ranks[0].events}


@pytest.mark.parametrize(
    ("discipline", "waits_for_all"), [(Discipline.CACHING, True), (Discipline.EXPANDABLE, False)]
)
def test_giving_the_cache_back_waits_for_the_device_and_unmapping_for_one_stream(
    discipline: Discipline, *, waits_for_all: bool
) -> None:
    build = ScheduleBuilder.of("fragments", data=1)
    build.pools = [Pool(name="device", discipline=discipline)]
    other = build.buffer("other", 8 * MIB, persistent=True, home=COMMUNICATION)
    first, second = build.buffer("first", 8 * MIB), build.buffer("second", 10 * MIB)
    build.setup.allocate(other)
    build.step.fill("long", other.all, 0.0, stream=COMMUNICATION)
    build.step.allocate(first)
    build.step.fill("short", View(buffer=first.name, start=0, size=25), 0.0)
    build.step.free(first)
    build.step.allocate(second)
    build.step.fill("next", View(buffer=second.name, start=0, size=25), 0.0)
    build.step.free(second)
    trace = run(build.schedule(), cluster(80 * MIB))
    # 32 MiB are not enough for 40: they go back, for which `cudaFree` waits for the device.
    assert spans(trace)["step/next"][0] == (32 * MIB if waits_for_all else 100)
    assert trace.out_of_memory is None


def on_memory(
    schedule: Schedule, model: Model, on: Cluster, memory_bytes: int, steps: int = 2
) -> tuple[Job, Trace]:
    gpu = replace(on.gpu, memory_bytes=memory_bytes)
    job = Job(schedule=schedule, model=model, cluster=replace(on, gpu=gpu), steps=steps)
    return job, SimBackend().run(job, seed=0)


def exact(model: Model, strategy: Strategy) -> Schedule:
    return handed_out(make_schedule(model, strategy), Discipline.EXACT)


clusters = st.builds(
    cluster,
    st.just(LARGE),
    launch_ps=st.sampled_from([0, 20, 1000]),
    share=st.sampled_from([Fraction(0), Fraction(1, 3)]),
    ranks=st.just(64),
)


def step_ms(gigabytes: float, **changes: object) -> float | None:
    """Milliseconds of a step of Llama 2 7B with so much memory for each rank; None: it fails."""
    given = {"cluster.gpu_memory": f"{gigabytes} GB", **changes}
    found = zsim.run("llama2_7b", given)
    return found.step_time_s * 1e3 if found.fits else None


@pytest.mark.matrix(6)
@pytest.mark.parametrize("allocator", ["caching", "expandable"])
def test_a_host_that_runs_ahead_pays_for_memory_that_is_full(allocator: str) -> None:
    changes = {
        "zero.emulate": "fsdp1",
        "zero.fsdp1.limit_all_gathers": False,
        "cluster.allocator": allocator,
    }
    took = [step_ms(gigabytes, **changes) for gigabytes in (6, 6.5, 8, 20, 2000)]
    assert took[0] is None
    times = [each for each in took if each is not None]
    assert len(times) == 4
    assert all(less >= more * 0.99 for less, more in pairwise(times))
    assert times[0] > times[-1] * 1.05


@pytest.mark.one_commit_in(12)
def test_limits_of_deepspeed_count_where_memory_is_full() -> None:
    def took(gigabytes: float, live: int) -> float | None:
        limit = {"zero.deepspeed.stage3_max_live_parameters": live}
        return step_ms(gigabytes, **{"zero.emulate": "deepspeed", **limit})

    assert took(8.6, 10**9) is None
    assert took(8.6, 1) is not None


jobs = st.one_of(emulated_jobs(), pipelined_jobs())


@pytest.mark.one_commit_in(24)
@given(jobs, clusters, st.lists(st.floats(0, 1), min_size=2, max_size=4))
@examples(60)
def test_a_step_with_less_memory_takes_as_long_or_longer_and_fails_where_it_needs_more(
    drawn: tuple[Model, Strategy], on: Cluster, parts: list[float]
) -> None:
    """No step is faster than one with more memory.

    Where collectives slow kernels down, or share links as those that FSDP1 prefetches in forward
    do, a wait may end an overlap that cost more than it: there links are so fast that none lasts.
    """
    model, strategy = drawn
    runtime = strategy.zero.emulate
    if isinstance(runtime, FSDP1) and runtime.forward_prefetch:
        fast = Link(bytes_per_s=LARGE)
        on = replace(on, switch_link=fast, nic_link=fast)
    schedule = exact(model, strategy)
    on = replace(on, gpu=replace(on.gpu, collective_share=Fraction(0)))
    needed = max(needed_bytes(each, schedule.pools[0]) for each in schedule.programs)
    most = max(peak_bytes(memory_ledger(each, 2), "device") for each in schedule.programs)
    sizes = sorted({needed, most, *(needed + int((most - needed) * part) for part in parts)})
    took: list[float] = []
    for memory_bytes in sizes:
        job, trace = on_memory(schedule, model, on, memory_bytes)
        found = summary(job, trace)
        assert found.fits
        assert found.needed_bytes == needed <= found.peak_reserved_bytes <= memory_bytes
        assert against_trace.examine(schedule, trace) == []
        took.append(found.step_time_s)
    assert all(less >= more * 0.99 for less, more in combinations(took, 2))
    _, trace = on_memory(schedule, model, on, LARGE)
    assert took[-1] * 1e12 == pytest.approx(trace.step_end_ps[1] - trace.step_end_ps[0])
    assert on_memory(schedule, model, on, needed - 1)[1].out_of_memory is not None


@pytest.mark.one_commit_in(12)
@given(jobs, clusters, st.integers(1, 3))
@examples(40)
def test_a_host_that_asks_and_never_waits_does_what_one_does_that_need_not_ask(
    drawn: tuple[Model, Strategy], on: Cluster, steps: int
) -> None:
    model, strategy = drawn
    schedule = make_schedule(model, strategy)
    _, plain = on_memory(schedule, model, on, LARGE, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worst_case.WorstCases, "may_wait", lambda *_: True)
        _, asked = on_memory(schedule, model, on, LARGE, steps)
    assert asked == plain


@pytest.mark.one_commit_in(12)
@given(jobs, st.floats(0, 1))
@examples(50)
def test_memory_that_is_full_makes_no_difference_between_ranks_that_are_alike(
    drawn: tuple[Model, Strategy], part: float
) -> None:
    model, strategy = drawn
    schedule = exact(model, strategy)
    needed = max(needed_bytes(each, schedule.pools[0]) for each in schedule.programs)
    most = max(peak_bytes(memory_ledger(each, 2), "device") for each in schedule.programs)
    on = cluster(needed + int((most - needed) * part), ranks=64)
    job = Job(schedule=schedule, model=model, cluster=on, steps=2)
    assert SimBackend().step_ends_ps(job) == SimBackend(unfold=True).step_ends_ps(job)


@pytest.mark.one_commit_in(9)
@given(jobs, st.sampled_from([Discipline.EXACT, Discipline.CACHING]), st.floats(0, 1.1))
@examples(40)
def test_what_books_alone_say_of_a_fit_is_what_a_run_says(
    drawn: tuple[Model, Strategy], discipline: Discipline, part: float
) -> None:
    model, strategy = drawn
    schedule = handed_out(make_schedule(model, strategy), discipline)
    least = max(needed_bytes(each, schedule.pools[0]) for each in schedule.programs)
    most = max(peak_bytes(memory_ledger(each, 2), "device") for each in schedule.programs)
    job, trace = on_memory(schedule, model, cluster(LARGE, ranks=64), max(1, int(most * part)))
    known = certain_footprint(job)
    found = summary(job, trace)
    if known is None:
        assert found.needed_bytes >= least
    else:
        assert known.fits is found.fits
        assert known.fits is (known.shortage is None)
    if known is not None and known.fits:
        assert known.reserved_bytes >= found.peak_reserved_bytes


@given(jobs, st.integers(0, 3), st.integers(0, 3))
@examples(30)
def test_a_book_that_is_kept_is_the_one_that_would_be_made(
    drawn: tuple[Model, Strategy], first: int, second: int
) -> None:
    (program, *_) = make_schedule(*drawn).programs
    again = replace(program)
    kept = [memory_ledger(program, steps) for steps in (first, second)]
    assert kept == [memory_ledger(again, second), memory_ledger(again, first)][::-1]
    assert kept[1] == memory_ledger(program, second, returns=WorstCase())
