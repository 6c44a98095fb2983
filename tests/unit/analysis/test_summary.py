"""The figures of a run, from times that are given."""

from dataclasses import replace

import pytest
from drawn_clusters import NO_MODEL

from zsim.analysis.summary import Summary, summary
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import COMMUNICATION, ScheduleBuilder
from zsim.schedule.operation import Action, Role
from zsim.schedule.schedule import Kind
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.strategy import Strategy, Zero
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_null import NullBackend

# FLOPs, bytes on a link: one per picosecond each, so that times can be read off.
RATE = Rate(dtype=DType.FP32, peak=4 * 10**12, matmul=10**12, elementwise=10**12)
CLUSTER = Cluster(
    name="round",
    nodes=1,
    gpus_per_node=2,
    gpu=Gpu(name="round", memory_bytes=1000, memory_bytes_per_s=10**15, rates=(RATE,)),
    switch_link=Link(bytes_per_s=10**12),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=10**12),
)
MODEL = Model(
    name="given",
    units=NO_MODEL.units,
    batch=NO_MODEL.batch,
    tokens=7,
    forward_flops=600,
    backward_flops=1400,
)


def job(*, elements: int = 100) -> Job:
    """Forward for 1000 ps beside an all-reduce; then recompute for 500 ps, then a second one."""
    build = ScheduleBuilder.of("figures", data=2)
    one, two = build.group("one", "data"), build.group("two", "data")
    x = build.buffer("x", elements, kind=Kind.GRADIENT)
    y = build.buffer("y", 100)
    build.step.allocate(x, y)
    build.step.all_reduce("first", one, x.all)
    after: list[str] = []
    for name, action, flops in (
        ("forward", Action.FORWARD, 1000),
        ("again", Action.RECOMPUTE, 500),
    ):
        kernel = Kernel(kind=KernelKind.MATMUL, flops=flops, bytes=0, dtype=DType.FP32)
        operands = [(Role.OUTPUT, y.all)]
        after = [build.step.compute(name, action, operands, kernels=[kernel])]
    build.step.all_reduce("second", two, y.all, after=after, stream=COMMUNICATION)
    build.step.free(x, y)
    return Job(schedule=build.schedule(), model=MODEL, cluster=CLUSTER, steps=2)


def figures(given: Job) -> tuple[Summary, Trace]:
    trace = SimBackend().run(given, seed=0)
    return summary(given, trace), trace


def test_rates_count_recomputation_only_for_the_hardware() -> None:
    found, trace = figures(job())
    # all-reduce 2 x 1/2 x 400 = 400 ps under 1000 ps of forward, 500 ps again, 400 ps alone.
    assert trace.step_end_ps[0] == 1900
    seconds = (trace.step_end_ps[1] - 1900) / 1e12
    assert found.step_time_s == pytest.approx(seconds)
    # Two replicas of one micro-batch: 2 x 2000 FLOPs on 2 GPUs; executed: 1500 on each.
    assert found.model_tflops_per_gpu == pytest.approx(2000 / seconds / 1e12)
    assert found.hardware_tflops_per_gpu == pytest.approx(1500 / seconds / 1e12)
    assert found.mfu == pytest.approx(found.model_tflops_per_gpu / 4)
    assert found.hfu == pytest.approx(found.hardware_tflops_per_gpu / 4)
    assert found.tokens_per_s == pytest.approx(2 * 7 / seconds)


def test_causal_rates_leave_out_half_of_attention() -> None:
    shape = GPT(layers=1, hidden_size=4, attention_heads=1, sequence_length=32, vocab_size=2)
    strategy = Strategy(
        zero=Zero(stage=0), activations=Activations(checkpointing=Checkpointing.FULL)
    )
    model = gpt(shape, micro_batch_size=1)
    roomy = replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=10**9))
    given = Job(schedule=make_schedule(model, strategy), model=model, cluster=roomy, steps=1)
    found, _ = figures(given)
    every, causal = model.forward_flops + model.backward_flops, model.attention_flops // 2
    again = model.forward_flops - 2 * 32 * 4 * 2  # the block without the head's product
    rate = found.model_tflops_per_gpu / every
    assert found.hardware_tflops_per_gpu == pytest.approx(rate * (every + again))
    assert found.causal.model_tflops_per_gpu == pytest.approx(rate * (every - causal))
    executed = every + again - causal - causal // 3
    assert found.causal.hardware_tflops_per_gpu == pytest.approx(rate * executed)
    assert found.causal.mfu == pytest.approx(found.causal.model_tflops_per_gpu / 4)
    assert found.causal.hfu == pytest.approx(found.causal.hardware_tflops_per_gpu / 4)


def test_communication_is_exposed_where_nothing_computes() -> None:
    given = job()
    trace = SimBackend().run(Job(schedule=given.schedule, model=MODEL, cluster=CLUSTER), seed=0)
    found = summary(given, trace)
    assert found.exposed_communication_s == pytest.approx(400e-12)
    assert dict(found.exposed_by_group) == pytest.approx({"one": 0.0, "two": 400e-12})


def test_memory_is_the_book_s_peak_by_kind_and_says_whether_it_fits() -> None:
    found, _ = figures(job())
    assert found.peak_allocated_bytes == 800
    assert dict(found.memory_by_kind)[Kind.GRADIENT] == 400
    assert found.fits
    assert not figures(job(elements=200))[0].fits


def test_a_backend_without_a_clock_has_no_rates() -> None:
    found = summary(job(), NullBackend().run(job(), seed=0))
    assert (found.step_time_s, found.mfu, found.tokens_per_s) == (0.0, 0.0, 0.0)
    assert found.peak_allocated_bytes == 800
