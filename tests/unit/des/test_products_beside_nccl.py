"""Backward of Megatron-LM's column-parallel layers: collectives of NCCL go on beside products."""

from dataclasses import replace
from functools import cache

import pytest
from fitting import fitting
from wide_products import WIDE, before_ps, cluster, events, kernels_of, run

from zsim.backend.backend import Job
from zsim.compute.roofline import kernel_ps
from zsim.model.kernel import FusedPart
from zsim.proof import against_trace
from zsim.runtimes.registry import make_schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

RANKS = 4
PRODUCT = "step/backward/mb0/block1/backward1"
GRADIENT, READ, SCATTER, SUM = (
    f"{PRODUCT}/{end}"
    for end in (
        "gather/block1/proj/gradient",
        "gather/block1/ln1",
        "scatter/block1/ln1",
        "sum/block1/ln1",
    )
)


@cache
def job(*, cut: bool = True, beside: bool = True, links: float = 1.0, share: float = 0.0) -> Job:
    strategy = Strategy(
        parallel=Parallel(tensor=RANKS),
        zero=Zero(
            stage=0,
            emulate=Megatron(sequence_parallel=cut, async_tensor_model_parallel_allreduce=beside),
        ),
        train=Train(precision=Precision.BF16),
    )
    model = fitting(replace(WIDE, execution=strategy.execution), strategy)
    made = make_schedule(model, strategy)
    return Job(schedule=made, model=model, cluster=cluster(links=links, share=share), steps=1)


@pytest.mark.parametrize("links", [0.02, 1.0])
def test_what_was_read_is_gathered_beside_the_gradient_of_it_alone(links: float) -> None:
    # Attention's backward stands before, which upstream has ended when the gather is issued.
    of = job(links=links)
    found = events(run(of))
    made, read = found[PRODUCT], found[READ]
    begun_ps = found[GRADIENT].end_ps + before_ps(of, PRODUCT, FusedPart.BESIDE_GATHER)
    assert before_ps(of, PRODUCT, FusedPart.BESIDE_GATHER) > 0
    assert read.start_ps == pytest.approx(begun_ps, abs=10)
    product_ps = before_ps(of, PRODUCT, FusedPart.BESIDE_GATHER, after=True)
    product_ps -= before_ps(of, PRODUCT, FusedPart.BESIDE_GATHER)
    both_end_ps = max(read.end_ps, read.start_ps + product_ps)
    rest_ps = sum(kernel_ps(each, of.cluster.gpu) for each in kernels_of(of, PRODUCT))
    rest_ps -= before_ps(of, PRODUCT, FusedPart.BESIDE_GATHER, after=True)
    assert made.end_ps == pytest.approx(both_end_ps + rest_ps, rel=0.01)


@pytest.mark.parametrize("links", [0.02, 1.0])
@pytest.mark.parametrize(("cut", "name"), [(True, SCATTER), (False, SUM)])
def test_its_gradient_goes_beside_the_gradients_of_weights(
    links: float, name: str, *, cut: bool
) -> None:
    of = job(links=links, cut=cut)
    found = events(run(of))
    weights_ps = sum(kernel_ps(each, of.cluster.gpu) for each in kernels_of(of, PRODUCT))
    weights_ps -= before_ps(of, PRODUCT, FusedPart.BESIDE_SCATTER)
    begun_ps = found[PRODUCT].end_ps - weights_ps
    assert found[name].start_ps == pytest.approx(begun_ps, abs=10)
    assert found[name].end_ps >= found[PRODUCT].end_ps


@pytest.mark.parametrize("links", [0.02, 1.0])
@pytest.mark.parametrize("cut", [True, False])
def test_the_run_is_one_of_the_schedule(links: float, *, cut: bool) -> None:
    of = job(links=links, cut=cut)
    assert against_trace.examine(of.schedule, run(of)) == []


@pytest.mark.parametrize("links", [0.02, 1.0])
@pytest.mark.parametrize("cut", [True, False])
def test_a_step_is_no_slower_than_with_collectives_in_between(links: float, *, cut: bool) -> None:
    def step_ps(*, beside: bool) -> int:
        return run(job(links=links, cut=cut, beside=beside)).step_end_ps[-1]

    assert step_ps(beside=True) < step_ps(beside=False)


def test_collectives_take_multiprocessors_from_these_products() -> None:
    def taken_ps(share: float) -> int:
        made = events(run(job(links=0.1, share=share)))[PRODUCT]
        return made.end_ps - made.start_ps

    assert taken_ps(0.4) > taken_ps(0.1)


def test_bytes_move_as_they_do_between_products() -> None:
    # On links that are all that counts, a gather beside a product takes as long as one alone.
    def read_ps(*, beside: bool) -> int:
        found = events(run(job(links=0.02, beside=beside)))[READ]
        return found.end_ps - found.start_ps

    assert read_ps(beside=True) == pytest.approx(read_ps(beside=False), rel=0.01)
