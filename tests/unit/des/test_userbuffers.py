"""Products of Megatron-LM's tensor ranks beside collectives of tokens: both go on at once."""

from dataclasses import replace
from functools import cache

import pytest
from fitting import fitting
from wide_products import WIDE, before_ps, cluster, events, kernels_of, run

from zsim.backend.backend import Job
from zsim.compute.roofline import kernel_ps
from zsim.files.installed import (
    topology,
)
from zsim.files.nearest_gpu import kernel_profile
from zsim.model.kernel import FusedPart, matmul
from zsim.proof import against_trace
from zsim.runtimes.registry import make_schedule
from zsim.strategy.overlap_methods import ByKernel, OverlapMethods
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

RANKS = 4
OVERLAPPED = Megatron(sequence_parallel=True, tp_comm_overlap=True)
COMPETING = OVERLAPPED.but(
    tp_comm_overlap_cfg=OverlapMethods(
        fc1_dgrad=ByKernel(set_sm_margin=False), fc1_wgrad=ByKernel(set_sm_margin=False)
    )
)
OPTIONS = {
    "leaving": OVERLAPPED,
    "competing": COMPETING,
    "between": Megatron(sequence_parallel=True),
}
BESIDE = Strategy(
    parallel=Parallel(tensor=RANKS),
    zero=Zero(stage=0, emulate=OVERLAPPED),
    train=Train(precision=Precision.BF16),
)
PRODUCT = "step/backward/mb0/block1/backward4"
GRADIENT, READ, SCATTER = (
    f"{PRODUCT}/{end}"
    for end in ("gather/block1/down/gradient", "gather/block1/ln2", "scatter/block1/ln2")
)


@cache
def job(which: str = "leaving", *, links: float = 1.0, share: float = 0.0) -> Job:
    strategy = BESIDE.but({"zero.emulate": OPTIONS[which]})
    model = fitting(replace(WIDE, execution=strategy.execution), strategy)
    made = make_schedule(model, strategy)
    return Job(schedule=made, model=model, cluster=cluster(links=links, share=share), steps=1)


@pytest.mark.parametrize("links", [0.02, 0.3, 1.0])
def test_gradients_of_weights_wait_for_what_was_read_and_for_that_of_the_input(
    links: float,
) -> None:
    of = job(links=links)
    found = events(run(of))
    made, gradient, read = found[PRODUCT], found[GRADIENT], found[READ]
    gpu = of.cluster.gpu
    whole_ps = sum(kernel_ps(each, gpu) for each in kernels_of(of, PRODUCT))
    # All products of the gradient but the last begin when ranks have met, and that one waits for
    # all tokens; what is behind the product beside the gather waits for the end of both.
    last_ps = next(
        kernel_ps(each, gpu) for each in kernels_of(of, PRODUCT) if each.part is FusedPart.GRADIENT
    )
    gathered_ps = before_ps(of, PRODUCT, FusedPart.GRADIENT, after=True) - last_ps
    beside_ps = before_ps(of, PRODUCT, FusedPart.BESIDE_GATHER, after=True)
    begun_ps = made.end_ps - whole_ps  # if nothing is waited for
    assert made.end_ps >= gradient.end_ps + whole_ps - gathered_ps - 10
    assert made.end_ps >= read.end_ps + whole_ps - beside_ps - 10
    waits = (gradient.end_ps - gathered_ps, read.end_ps - beside_ps, begun_ps)
    assert begun_ps == pytest.approx(max(waits), abs=10)


@pytest.mark.parametrize("links", [0.02, 1.0])
def test_what_is_scattered_goes_beside_the_gradients_of_weights(links: float) -> None:
    of = job(links=links)
    found = events(run(of))
    weights_ps = sum(kernel_ps(each, of.cluster.gpu) for each in kernels_of(of, PRODUCT))
    weights_ps -= before_ps(of, PRODUCT, FusedPart.BESIDE_SCATTER)
    begun_ps = found[PRODUCT].end_ps - weights_ps
    assert found[SCATTER].start_ps == pytest.approx(begun_ps, abs=10)
    assert found[SCATTER].end_ps >= found[PRODUCT].end_ps
    assert found[f"{SCATTER}/own"].start_ps >= found[SCATTER].end_ps


@pytest.mark.parametrize("links", [0.02, 1.0])
def test_the_run_is_one_of_the_schedule(links: float) -> None:
    of = job(links=links)
    assert against_trace.examine(of.schedule, run(of)) == []


@pytest.mark.parametrize("links", [0.02, 1.0])
def test_a_step_is_no_slower_than_with_collectives_in_between(links: float) -> None:
    # Each rank sends as many bytes; what is hidden is more than a kernel for each part.
    def step_ps(which: str) -> int:
        return run(job(which, links=links)).step_end_ps[-1]

    assert step_ps("leaving") < step_ps("between")


def test_kernels_of_collectives_take_multiprocessors_that_products_do_not_leave() -> None:
    def taken_ps(which: str, share: float) -> int:
        made = events(run(job(which, share=share)))[PRODUCT]
        return made.end_ps - made.start_ps

    assert taken_ps("leaving", 0.4) == taken_ps("leaving", 0.1)
    assert taken_ps("competing", 0.4) > taken_ps("competing", 0.1)


def test_products_that_leave_multiprocessors_have_fewer_and_so_take_longer() -> None:
    gpu = replace(topology("dgx_h100_infiniband", None, 1).gpu, kernels=kernel_profile("h100"))
    # 64 x 64 tiles of 256 x 128: so many waves that multiprocessors are all that counts
    kernel = matmul(64 * 256, 64 * 128, 4096, Precision.BF16.compute)
    fewer = replace(kernel, spared=33)
    # of 132 multiprocessors a quarter
    assert kernel_ps(fewer, gpu) / kernel_ps(kernel, gpu) == pytest.approx(4 / 3, rel=0.01)


def test_products_of_several_streams_fill_each_others_last_wave() -> None:
    gpu = replace(topology("dgx_h100_infiniband", None, 1).gpu, kernels=kernel_profile("h100"))
    # 8 x 25 tiles of 256 x 128 are a wave and a half of 132: three of them are five waves
    kernel = matmul(8 * 256, 25 * 128, 8192, Precision.BF16.compute)
    together = replace(kernel, streams=3)
    assert kernel_ps(together, gpu) < kernel_ps(kernel, gpu)
    assert kernel_ps(together, gpu) > kernel_ps(replace(kernel, streams=100), gpu) * 0.9
