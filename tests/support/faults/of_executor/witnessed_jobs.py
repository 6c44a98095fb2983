"""Jobs of two ranks, and one of four, whose runs are recorded."""

from dataclasses import replace
from functools import cache

from drawn_clusters import NO_MODEL
from exact_training import cluster

from faults.variants import BF16, FP16, RECOMPUTED, Changes, accumulating, zero
from zsim.backend.backend import Job
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import Reduction
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.offload import MemoryTier
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2

CALLS, FOUR = "calls", "four ranks"
ZERO0, ZERO1, ZERO2, ZERO3 = "stage 0", "stage 1, clipped", "stage 2, fp16, clipped", "stage 3"
FSDP = "fsdp2, bf16, clipped"
RANKS = 2
SHAPE = GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=4, vocab_size=257)
DEEP = replace(SHAPE, layers=4)
PLAIN = Strategy(
    parallel=Parallel(data=RANKS),
    zero=Zero(stage=0, bucket_elements=90),
    train=Train(gradient_accumulation_steps=2),
)
CLIPPED: Changes = {"train.clip_norm": 0.01}
FP16_SCALED = FP16 | CLIPPED | {"train.loss_scale": LossScale(initial=2.0)}


def emulating(stage: int, runtime: RuntimeOptions, changes: Changes) -> Strategy:
    """Return a strategy of a runtime."""
    return PLAIN.but({"zero": Zero(stage=stage, emulate=runtime), **changes})


SMALL = DeepSpeed(reduce_bucket_size=300)
STRATEGIES = {
    ZERO0: PLAIN,
    ZERO1: PLAIN.but(zero(stage=1) | CLIPPED),
    ZERO2: PLAIN.but(zero(stage=2) | FP16_SCALED),
    ZERO3: PLAIN.but(zero(stage=3)),
    "stage 3, checkpoints": PLAIN.but(zero(stage=3) | RECOMPUTED),
    FSDP: emulating(3, FSDP2(), BF16 | CLIPPED),
    "fsdp2, checkpoints": emulating(3, FSDP2(), RECOMPUTED | accumulating(1)),
    "deepspeed 2, fp16, clipped": emulating(2, SMALL, FP16_SCALED),
    "deepspeed 3": emulating(3, SMALL, accumulating(1)),
}
"""Strategies whose schedules are run without a fault."""

KEPT = SMALL.but(cpu_checkpointing=True)
ON_HOST = {
    "stage 2, checkpoints on the host": PLAIN.but(
        zero(stage=2) | RECOMPUTED | {"offload.checkpoints": MemoryTier.HOST}
    ),
    **{
        f"{name}, checkpoints on the host": emulating(stage, runtime, RECOMPUTED)
        for name, stage, runtime in (
            ("fsdp1", 3, FSDP1(offload_wrapper=True)),
            ("fsdp2", 3, FSDP2(offload_wrapper=True)),
            ("deepspeed 1", 1, KEPT),
            ("deepspeed 3, on their stream", 3, KEPT.but(checkpoint_stream=True)),
        )
    },
}
"""Strategies of a deeper model, whose checkpoints go to host memory and come back."""


def calls() -> Schedule:
    """Every kind of collective, in two groups of the same ranks."""
    build = ScheduleBuilder.of(CALLS, data=RANKS)
    data, other = build.group("data", "data"), build.group("other", "data")
    kept = build.buffer("kept", 8, kind=Kind.PARAMETER, persistent=True)
    build.setup.allocate(kept)
    build.setup.fill("zero", kept.all, 0.0)
    names = ("whole", "part", "gathered", "first", "second", "came")
    whole, part, gathered, first, second, came = (
        build.buffer(name, 8 if name in ("whole", "gathered") else 4) for name in names
    )
    step = build.step
    step.allocate(whole, part, gathered, first, second, came)
    ones = step.fill("ones", whole.all, 1.0)
    own = step.fill("own", whole.own("data", 4), 3.0, after=[ones])
    scattered = step.reduce_scatter("scatter", other, whole.all, part.all, after=[own])
    gather = step.all_gather("gather", data, part.all, gathered.all, after=[scattered])
    copied = [
        step.copy("half", gathered[0:4], first.all, after=[gather]),
        step.copy("rest", gathered[4:8], second.all, divisor=2),
        step.copy("sum", gathered.all, kept.all, accumulate=True),
    ]
    step.all_reduce("first", data, first.all, reduction=Reduction.AVERAGE)
    step.all_reduce("second", data, second.all, reduction=Reduction.AVERAGE)
    reduced = step.together("reduced", 2, after=copied)
    most = step.all_reduce("most", data, first[0:1], reduction=Reduction.MAX, after=[reduced])
    step.host_wait("wait", most)
    sent = step.broadcast("broadcast", data, second.all, root=1, after=[most])
    step.send("to", data, part.all, 1)
    step.receive("from", data, came.all, 1)
    passed = step.together("passed", 2, after=[sent])
    step.copy("end", came.all, kept[4:8], accumulate=True, after=[passed])
    last = step.broadcast("last", other, whole.all, after=[passed])
    step.free(whole, part, gathered, first, second, came, uses=[last])
    return build.schedule()


def four() -> Schedule:
    """Four ranks in two groups of two, and messages around the ring of all."""
    build = ScheduleBuilder.of(FOUR, replicate=2, data=2)
    data, ring = build.group("data", "data"), build.group("ring", "replicate", "data")
    build.group("replicate", "replicate")
    own, summed, came = (build.buffer(name, 4) for name in ("own", "summed", "came"))
    step = build.step
    step.allocate(own, summed, came)
    filled = step.fill("fill", own.all, 1.0)
    reduced = step.all_reduce("sum", data, own.all, summed.all, after=[filled])
    step.send("to", ring, summed.all, 1)
    step.receive("from", ring, came.all, -1)
    passed = step.together("passed", 2, after=[reduced])
    step.free(own, summed, came, uses=[passed])
    return build.schedule()


@cache
def job(name: str) -> Job:
    """The job `name`: two steps."""
    if name == CALLS:
        return Job(schedule=calls(), model=NO_MODEL, cluster=cluster(RANKS), steps=2)
    if name == FOUR:
        return Job(schedule=four(), model=NO_MODEL, cluster=cluster(4), steps=2)
    shape = DEEP if name in ON_HOST else SHAPE
    strategy = ON_HOST[name] if name in ON_HOST else STRATEGIES[name]
    model = gpt(shape, micro_batch_size=1, precision=strategy.train.precision)
    return Job(
        schedule=make_schedule(model, strategy), model=model, cluster=cluster(RANKS), steps=2
    )
