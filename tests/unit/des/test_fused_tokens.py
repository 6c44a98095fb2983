"""Products that are fused with copies of tokens: both go on at once, part by part."""

from functools import cache

import pytest
from fitting import fitting
from wide_products import WIDE, cluster, events, run

from zsim.backend.backend import Job
from zsim.compute.roofline import kernel_ps
from zsim.model.kernel import FusedPart
from zsim.proof import against_trace
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Compute
from zsim.schedule.replace import replace
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_runtimes.fsdp2.options import FSDP2

RANKS = 4
FUSED = Strategy(
    parallel=Parallel(tensor=RANKS),
    zero=Zero(stage=3, emulate=FSDP2(enable_async_tensor_parallel=True)),
    train=Train(precision=Precision.BF16, compile=True),
)
GATHER, PRODUCT, SCATTER = (
    f"step/forward/mb0/block1/forward1{end}" for end in ("/gather/block1/ln1", "", "/scatter")
)


@cache
def job(*, fused: bool = True, links: float = 1.0, share: float = 0.0) -> Job:
    options = FSDP2(enable_async_tensor_parallel=fused)
    strategy = FUSED.but({"zero.emulate": options})
    model = fitting(replace(WIDE, execution=strategy.execution), strategy, sequences=2)
    made = make_schedule(model, strategy)
    return Job(schedule=made, model=model, cluster=cluster(links=links, share=share), steps=1)


def product(of: Job) -> Compute:
    step = of.schedule.programs[0].step
    return next(each for each in step if isinstance(each, Compute) and each.id == PRODUCT)


def kernels_ps(of: Job, *parts: FusedPart) -> int:
    """Time of the kernels of the product, or of those that have one of these parts."""
    found = (each for each in product(of).kernels if not parts or each.part in parts)
    return sum(kernel_ps(each, of.cluster.gpu) for each in found)


@pytest.mark.parametrize("links", [0.02, 0.3, 1.0, 30.0])
def test_the_last_part_waits_for_the_last_copy_and_copies_for_the_first_part(links: float) -> None:
    of = job(links=links)
    found = events(run(of))
    gather, made, scatter = found[GATHER], found[PRODUCT], found[SCATTER]
    # Of so many parts all but the last are multiplied from when the copies begin. Copies are a
    # direct exchange: (4 - 1) / 4 of all tokens go over the link of a rank.
    whole_bytes = 2 * WIDE.sequence_length * WIDE.hidden_size * 2
    rate = of.cluster.switch_link.bytes_per_s
    copies_ps = -(-whole_bytes * (RANKS - 1) // RANKS * 10**12 // rate)
    begun_ps = gather.end_ps - copies_ps
    last_ps = kernels_ps(of, FusedPart.GATHERED) // RANKS
    kernels = product(of).kernels
    end = max(place for place, each in enumerate(kernels) if each.part is FusedPart.GATHERED) + 1
    before_ps = sum(kernel_ps(each, of.cluster.gpu) for each in kernels[:end]) - last_ps
    scattered_ps = kernels_ps(of, FusedPart.SCATTERED)
    sum_ps = kernels_ps(of, FusedPart.SUM)
    whole_ps = kernels_ps(of) - sum_ps
    tail_ps = max(begun_ps + before_ps, gather.end_ps)
    assert made.end_ps == pytest.approx(tail_ps + whole_ps - before_ps, abs=10)
    assert made.end_ps - made.start_ps == pytest.approx(whole_ps, abs=10)
    first_ps = made.end_ps - scattered_ps + scattered_ps // RANKS
    assert scatter.start_ps == pytest.approx(first_ps, abs=10)
    come_ps = scatter.start_ps + (gather.end_ps - gather.start_ps)
    assert scatter.end_ps == pytest.approx(max(come_ps, made.end_ps) + sum_ps, abs=10)


@pytest.mark.parametrize("links", [0.02, 1.0])
def test_the_run_is_one_of_the_schedule(links: float) -> None:
    of = job(links=links)
    trace = run(of)
    assert against_trace.examine(of.schedule, trace) == []
    assert events(trace)[PRODUCT].start_ps < events(trace)[GATHER].end_ps


@pytest.mark.parametrize("links", [0.02, 1.0, 30.0])
def test_a_step_is_no_slower_than_with_collectives_in_between(links: float) -> None:
    def step_ps(*, fused: bool) -> int:
        return run(job(fused=fused, links=links)).step_end_ps[-1]

    # Of direct copies as of a ring each rank sends three parts; each fused pair is shorter by what
    # is hidden, and longer by a kernel for each part and the copy into symmetric memory.
    assert step_ps(fused=True) < step_ps(fused=False)


def ended(trace: Trace, operation: str, end_ps: int) -> Trace:
    (rank,) = trace.ranks
    changed = tuple(
        replace(each, end_ps=end_ps) if each.operation == operation else each
        for each in rank.events
    )
    return replace(trace, ranks=(replace(rank, events=changed),))


@pytest.mark.parametrize(("early", "late"), [(PRODUCT, GATHER), (SCATTER, PRODUCT)])
def test_a_run_that_ends_a_part_before_what_it_is_made_of_is_refuted(early: str, late: str) -> None:
    of = job(links=0.02)
    trace = run(of)
    found = events(trace)
    wrong = ended(trace, early, max(found[early].start_ps, found[late].end_ps - 1))
    whys = [each.why for each in against_trace.examine(of.schedule, wrong)]
    assert any(f"ends in step 0 before {late}" in why for why in whys), whys


def test_copies_take_no_multiprocessors_from_the_product_beside_them() -> None:
    def taken_ps(share: float) -> int:
        made = events(run(job(share=share)))[PRODUCT]
        return made.end_ps - made.start_ps

    assert taken_ps(0.1) == taken_ps(0.4)
