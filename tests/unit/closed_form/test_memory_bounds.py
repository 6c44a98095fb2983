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

CLOSE = 0.9
"""Least ratio of the bound to the live bytes."""

OPTIONS: dict[str, tuple[dict[str, object], ...]] = {
    "megatron": (
        {},
        {"grad_reduce_in_fp32": True},
        {"overlap_grad_reduce": True},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "tp_comm_overlap": True},
    ),
    "nanotron": ({}, {"tp_mode": "reduce_scatter"}),
    "fsdp1": ({}, {"no_sync": True}, {"sharding_strategy": "shard_grad_op"}),
    "fsdp2": ({}, {"gradient_sync": "last"}, {"reshard_after_forward": False}),
    "ddp": ({}, {"gradient_as_bucket_view": True}, {"no_sync": False}),
    "deepspeed": (
        {},
        {"reduce_bucket_size": 1_000_000},
        {"overlap_comm": True},
        {"stage3_prefetch_bucket_size": 500_000_000},
        {"stage3_max_reuse_distance": 0},
        {"offload_optimizer": {"device": "cpu"}},
        {"communication_data_type": "fp32"},
    ),
}
STAGES = {
    "megatron": (0, 1),
    "nanotron": (0, 1),
    "fsdp1": (3,),
    "fsdp2": (3,),
    "ddp": (0,),
    "deepspeed": (0, 1, 2, 3),
}
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
    stage = data.draw(st.sampled_from(STAGES[runtime]), "stage")
    if not stage:
        options = {name: value for name, value in options.items() if "offload" not in name}
    degrees = (1,) if runtime == "ddp" else (1, 2)
    tensor = (
        2 if options.get("sequence_parallel") else data.draw(st.sampled_from(degrees), "tensor")
    )
    pipeline = data.draw(st.sampled_from((1, 2) if runtime in HAVE_PIPELINE else (1,)), "pipeline")
    modes = ("none", "operations", *(() if options.get("tp_comm_overlap") else ("full",)))
    tables: dict[str, Any] = {
        "title": "bounded",
        "model": {
            "architecture": "llama",
            "layers": data.draw(st.sampled_from((2, 8)), "layers"),
            "hidden_size": 1024,
            "attention_heads": 8,
            "sequence_length": data.draw(st.sampled_from((1024, 4096)), "sequence"),
            "vocab_size": data.draw(st.sampled_from((32_000, 128_000)), "words"),
        },
        **gpu_fleet("8xh100").tables,
        "train": {
            "precision": "bf16",
            "micro_batch_size": data.draw(st.sampled_from((1, 4)), "micro-batch"),
            "gradient_accumulation_steps": pipeline * data.draw(st.sampled_from((1, 2)), "times"),
        },
        "activations": {
            "checkpointing": data.draw(st.sampled_from(modes), "kept"),
        },
        "parallel": {"tensor": tensor, "pipeline": pipeline, "data": 8 // tensor // pipeline},
        "zero": {
            "stage": stage,
            "emulate": runtime,
            runtime: options,
        },
    }
    return settled_source(tables).job()


@pytest.mark.parametrize("runtime", sorted(OPTIONS))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_bound_of_memory_is_at_most_the_live_bytes_and_close_to_them(
    runtime: str, data: st.DataObject
) -> None:
    job = job_of(runtime, data)
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    bound, live = device_bytes(job.model, strategy), live_bytes(job)
    assert CLOSE * live <= bound <= live


UNUSUAL: dict[str, tuple[dict[str, object], ...]] = {
    "fsdp1": (
        {"backward_prefetch": "backward_post"},
        {"backward_prefetch": "none"},
        {"forward_prefetch": True},
        {"limit_all_gathers": False},
        {"reduce_dtype": "fp32"},
        {"sharding_strategy": "shard_grad_op", "no_sync": True},
    ),
    "fsdp2": (
        {"all_reduce": "last"},
        {"forward_prefetch": 2},
        {"offload_policy": "cpu"},
        {"reduce_dtype": "fp32"},
        {"reshard_after_forward": False, "gradient_sync": "last"},
        {"reshard_root_after_forward": False},
    ),
    "ddp": (
        {"comm_hook": "bf16_compress"},
        {"no_sync": False, "gradient_as_bucket_view": True},
    ),
    "deepspeed": (
        {"reduce_bucket_size": 20_000_000},
        {"reduce_bucket_size": 20_000_000, "overlap_comm": True},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {"stage3_max_live_parameters": 5_000_000_000, "stage3_max_reuse_distance": 5_000_000_000},
        {"stage3_max_live_parameters": 1_000_000, "stage3_prefetch_bucket_size": 0},
        {"zero_hpz_partition_size": 2},
    ),
}


@pytest.mark.parametrize("runtime", sorted(UNUSUAL))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_bound_of_memory_is_at_most_the_live_bytes_with_unusual_options(
    runtime: str, data: st.DataObject
) -> None:
    """Adapters, experts, shared weights, replicas, shared sequences and every precision."""
    stage = data.draw(st.sampled_from((1, 2, 3) if runtime == "deepspeed" else STAGES[runtime]))
    options = data.draw(st.sampled_from(UNUSUAL[runtime]), "options")
    if stage < 3 and runtime == "deepspeed":
        options = {name: options[name] for name in options if "param" not in name}
    adapts = runtime != "fsdp1" and data.draw(st.booleans(), "adapters")
    has_experts = not adapts and data.draw(st.booleans(), "experts")
    replicate = data.draw(st.sampled_from((1, 2))) if runtime.startswith("fsdp") else 1
    experts = {"count": 4, "top_k": 2, "intermediate_size": 512}
    precisions = ("bf16", "fp32") if "comm_hook" in options else ("bf16", "fp16", "fp32")
    tables: dict[str, Any] = {
        "title": "unusual",
        "model": {
            "architecture": "llama",
            "layers": data.draw(st.sampled_from((2, 6)), "layers"),
            "hidden_size": data.draw(st.sampled_from((512, 2048)), "hidden"),
            "attention_heads": 8,
            "sequence_length": 1024,
            "vocab_size": data.draw(st.sampled_from((1_000, 64_000)), "words"),
            "tied_embeddings": data.draw(st.booleans(), "tied"),
            **({"lora": {"rank": 16}} if adapts else {}),
            **({"experts": experts} if has_experts else {}),
        },
        **gpu_fleet("8xh100").tables,
        "train": {
            "precision": data.draw(st.sampled_from(precisions), "precision"),
            "micro_batch_size": data.draw(st.sampled_from((1, 4)), "micro-batch"),
            "gradient_accumulation_steps": data.draw(st.sampled_from((1, 3)), "times"),
        },
        "activations": {"checkpointing": data.draw(st.sampled_from(("none", "full")), "kept")},
        "parallel": {"replicate": replicate, "data": 8 // replicate},
        "zero": {"stage": stage, "emulate": runtime, runtime: options},
    }
    job = settled_source(tables).job()
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    assert device_bytes(job.model, strategy) <= live_bytes(job)


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
