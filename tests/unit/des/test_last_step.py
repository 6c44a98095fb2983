"""The last step without a trace, and a schedule that is tried again: the figures of a full run."""

from typing import cast

import pytest

import zsim_scenarios
from zsim.analysis.summary import step_of, summary
from zsim.backend.backend import Job
from zsim.runtimes.registry import make_schedule
from zsim.scenario.toml import parse
from zsim_des import SimBackend
from zsim_study.study.outcome import Status
from zsim_study.study.proved import Proved
from zsim_study.workers.study_source import reader
from zsim_study.workers.worker import simulated

CASES = {
    "stage 3": (),
    "one step": ("train.steps=1",),
    "another order with deferred frees": ("zero.emulate=fsdp1", "zero.bucket_elements=500000000"),
    "another order": ("zero.emulate=fsdp2", "zero.bucket_elements=500000000"),
    "hosts that cost time": ("compute.profile=a100",),
    "a slow GPU": ("fault=[{kind='gpu',rank=1,factor=2}]",),
    "a neighbour": (
        "parallel.data=16",
        "neighbour=[{nodes=[0,1],bandwidth_per_direction='10 GB/s'}]",
    ),
    "a loss scale": ("train.precision=fp16", "parallel.tensor=2"),
    "memory that is too small": ("cluster.gpu_memory=1 MB",),
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_what_a_later_trial_says_is_what_a_run_says(settings: tuple[str, ...]) -> None:
    resolved = reader("tiny").resolve(parse(zsim_scenarios.text("tiny"), settings))
    model = resolved.make_model()
    job = Job(
        schedule=make_schedule(model, resolved.strategy),
        model=model,
        cluster=resolved.cluster,
        steps=resolved.steps,
    )
    backend = SimBackend(faults=resolved.faults, neighbours=resolved.neighbours)
    trace = backend.run(job, seed=0)
    assert backend.last_step(job, seed=0) == step_of(job, trace)
    made = cast("Proved", simulated(resolved))
    first, again = made.tried(resolved), made.tried(resolved)
    assert first == again
    assert first.summary == summary(job, trace)
    assert (first.status is Status.FULL) == (trace.out_of_memory is not None)
