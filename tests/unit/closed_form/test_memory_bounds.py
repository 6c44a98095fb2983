"""The lower bound of device memory is never above the live bytes of a schedule, and close to them.

Live bytes are the least memory that a rank can need: every free returns its memory at once, and no
allocator rounds or caches.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zsim.api.forecast import settled_source
from zsim.api.gpu_fleet import gpu_fleet
from zsim.backend.backend import Job
from zsim.memory import AtOnce, memory_ledger, peak_bytes
from zsim.schedule.schedule import Place
from zsim_plan.bounds.memory_bounds import device_bytes

CLOSE = {"megatron": 0.95, "nanotron": 0.95, "fsdp1": 0.9, "fsdp2": 0.85, "deepspeed": 0.8}
"""Least ratio of the bound to the live bytes; DeepSpeed's buckets are not counted."""

OPTIONS: dict[str, tuple[dict[str, object], ...]] = {
    "megatron": (
        {},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "tp_comm_overlap": True},
    ),
    "nanotron": ({}, {"tp_mode": "reduce_scatter"}),
    "fsdp1": ({}, {"no_sync": True}, {"sharding_strategy": "shard_grad_op"}),
    "fsdp2": ({}, {"gradient_sync": "last"}, {"reshard_after_forward": False}),
    "deepspeed": ({"reduce_bucket_size": 1_000_000},),
}
STAGES = {"megatron": 1, "nanotron": 1, "fsdp1": 3, "fsdp2": 3, "deepspeed": 2}
HAVE_PIPELINE = {"megatron", "nanotron"}


def live_bytes(job: Job) -> int:
    """Return the peak of live bytes in device memory of the rank that has most."""
    pools = [pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE]
    most = 0
    for program in job.schedule.programs:
        entries = memory_ledger(program, job.steps, returns=AtOnce() if program.defers else None)
        most = max(most, *(peak_bytes(entries, name) for name in pools))
    return most


def job_of(runtime: str, data: st.DataObject) -> Job:
    """Return the job of a drawn setting of a small model on eight GPUs."""
    options = data.draw(st.sampled_from(OPTIONS[runtime]), "options")
    tensor = 2 if options.get("sequence_parallel") else data.draw(st.sampled_from((1, 2)), "tensor")
    pipeline = data.draw(st.sampled_from((1, 2) if runtime in HAVE_PIPELINE else (1,)), "pipeline")
    modes = ("none", "operations", *(() if options.get("tp_comm_overlap") else ("full",)))
    tables: dict[str, Any] = {
        "title": "bounded",
        "model": {
            "architecture": "llama",
            "layers": 2,
            "hidden_size": 1024,
            "attention_heads": 8,
            "sequence_length": 4096,
            "vocab_size": data.draw(st.sampled_from((32_000, 128_000)), "words"),
        },
        **gpu_fleet("8xh100").tables,
        "train": {
            "precision": "bf16",
            "micro_batch_size": data.draw(st.sampled_from((2, 4)), "micro-batch"),
            "gradient_accumulation_steps": pipeline * data.draw(st.sampled_from((1, 2)), "times"),
        },
        "activations": {
            "checkpointing": data.draw(st.sampled_from(modes), "kept"),
        },
        "parallel": {"tensor": tensor, "pipeline": pipeline, "data": 8 // tensor // pipeline},
        "zero": {
            "stage": STAGES[runtime],
            "emulate": runtime,
            runtime: options,
        },
    }
    return settled_source(tables).job()


@pytest.mark.parametrize("runtime", sorted(CLOSE))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_bound_of_memory_is_at_most_the_live_bytes_and_close_to_them(
    runtime: str, data: st.DataObject
) -> None:
    job = job_of(runtime, data)
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    bound, live = device_bytes(job.model, strategy), live_bytes(job)
    assert CLOSE[runtime] * live <= bound <= live


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("runs", [1, 2])
def test_the_bound_of_fsdp1_has_the_parameters_of_all_blocks_that_it_keeps_gathered(
    *, no_sync: bool, runs: int
) -> None:
    """With deep models and full checkpointing, parameters are most of the memory."""
    options = {"sharding_strategy": "shard_grad_op", "no_sync": no_sync}
    tables = {
        "title": "deep",
        "model": {
            "architecture": "llama",
            "layers": 12,
            "hidden_size": 1024,
            "attention_heads": 8,
            "sequence_length": 512,
            "vocab_size": 1000,
        },
        **gpu_fleet("8xh100").tables,
        "train": {
            "precision": "bf16",
            "micro_batch_size": 1,
            "gradient_accumulation_steps": runs,
        },
        "activations": {"checkpointing": "full"},
        "parallel": {"data": 8},
        "zero": {"stage": 3, "emulate": "fsdp1", "fsdp1": options},
    }
    job = settled_source(tables).job()
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    assert 0.9 * live_bytes(job) <= device_bytes(job.model, strategy) <= live_bytes(job)
