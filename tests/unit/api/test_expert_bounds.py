"""No exchange of tokens of experts is faster in a run than the bounds of a search say."""

from dataclasses import replace
from typing import Any

import pytest
from drawn_clusters import NO_MODEL
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from zsim.api.forecast import settled_source
from zsim.api.gpu_fleet import gpu_fleet
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.host_launch import FREE
from zsim.dtype import DType
from zsim.files.installed import fitted_kernels, network_profile, topology
from zsim.memory.reserved import communicators
from zsim.model.expert_transport import ExpertChoice, ExpertTransport
from zsim.runtimes.registry import wire_bytes
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import WireBytes
from zsim.strategy.execution import DispatchLibrary
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_des import SimBackend
from zsim_plan.answer.setting_trial import (
    Bounder,
    communicators_of,
    cut_of,
    exchange_seconds,
    tried,
)
from zsim_plan.bounds.collective_bounds import CollectiveBounds
from zsim_plan.bounds.step_bounds import exchange_s

WIDTH = 512
BATCH = {"gradient_accumulation_steps": 1}


def cluster_of(nodes: int, *, is_rack: bool, is_fitted: bool) -> Cluster:
    node, profile = ("gb200_nvl72", "gb200") if is_rack else ("dgx_h100", "h100")
    found = topology(node, "fat_tree_2", nodes)
    if not is_fitted:
        return found
    kernels = replace(fitted_kernels()["h100_2025"].constants, launch=FREE)
    gpu = replace(found.gpu, kernels=kernels)
    return replace(found, gpu=gpu, network=network_profile(profile))


@given(
    cluster=st.builds(
        cluster_of,
        st.sampled_from((1, 2, 4)),
        is_rack=st.booleans(),
        is_fitted=st.booleans(),
    ),
    experts=st.sampled_from((16, 64)),
    top_k=st.sampled_from((1, 2, 8)),
    groups=st.sampled_from(((1, 1), (4, 2))),
    tokens=st.sampled_from((64, 4096)),
    library=st.none() | st.sampled_from(DispatchLibrary),
    half=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_no_exchange_takes_less_than_its_bound(
    *,
    cluster: Cluster,
    experts: int,
    top_k: int,
    groups: tuple[int, int],
    tokens: int,
    library: DispatchLibrary | None,
    half: bool,
) -> None:
    world = cluster.nodes * cluster.gpus_per_node
    ranks = world // 2 if half else world
    assume(experts % ranks == 0 and tokens * top_k % ranks == 0)
    transport = None
    if library is not None:
        choice = ExpertChoice(experts=experts, top_k=top_k, groups=groups[0], top_groups=groups[1])
        transport = ExpertTransport(library=library, choice=choice, width=WIDTH, num_sms=20)
    build = ScheduleBuilder.of("exchange", other=world // ranks, expert=ranks)
    group = build.group("expert", "expert")
    source, target = (
        build.buffer(name, tokens * top_k * WIDTH, dtype=DType.BF16) for name in ("a", "b")
    )
    build.step.allocate(source, target)
    build.step.all_to_all("it", group, source.all, target.all, by=transport)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster)
    (end_ps,) = SimBackend().step_ends_ps(job)
    sent = 2 * tokens * top_k * WIDTH * (ranks - 1) // ranks
    line = WireBytes(group="expert", collective="all_to_all", bytes=sent)
    strategy = Strategy(parallel=Parallel.of({"data": world, "expert": ranks}), zero=Zero(stage=1))
    times = None if cluster.network is None else CollectiveBounds(cluster)
    seconds = exchange_seconds(cluster, times)
    bound_s = exchange_s([line], strategy, cut_of(cluster), seconds, transport=transport)
    assert bound_s > 0
    assert end_ps / 1e12 >= bound_s * (1 - 1e-9)


def tables_of(dispatcher: dict[str, Any], *, gpus: int, expert: int) -> dict[str, Any]:
    return {
        "title": "experts",
        "model": {
            "architecture": "llama",
            "layers": 2,
            "hidden_size": 256,
            "attention_heads": 4,
            "intermediate_size": 512,
            "sequence_length": 1024,
            "vocab_size": 1000,
            "experts": {"count": 16, "top_k": 4, "intermediate_size": 64},
        },
        **gpu_fleet(f"{gpus}xh100").tables,
        "train": {"precision": "bf16", "micro_batch_size": 4, "compile": True} | BATCH,
        "parallel": {"data": gpus, "expert": expert},
        "zero": {"stage": 1, "emulate": "megatron", "megatron": dispatcher},
    }


@pytest.mark.parametrize(
    "dispatcher",
    [
        {"moe_token_dispatcher_type": "alltoall"},
        {"moe_token_dispatcher_type": "flex"},
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
    ],
    ids=["alltoall", "deepep", "hybridep"],
)
def test_no_step_with_expert_ranks_goes_below_its_bounds(dispatcher: dict[str, Any]) -> None:
    tables = tables_of(dispatcher, gpus=16, expert=16)
    bound, outcome = Bounder().bound(tables), tried(tables)
    assert not outcome.refusal
    assert not bound.why_not
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)


@pytest.mark.one_commit_in(9)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dispatcher=st.sampled_from(
        [{"moe_token_dispatcher_type": kind} for kind in ("alltoall", "flex")]
    ),
    gpus=st.sampled_from([8, 16]),
    expert=st.sampled_from([2, 4, 8, 16]),
    pipeline=st.sampled_from([1, 2]),
    busiest=st.sampled_from([None, 1.1]),
    hidden=st.sampled_from([256, 2048]),
    checkpointing=st.sampled_from(["none", "full"]),
    micro_batches=st.integers(1, 5),
)
def test_exchanges_of_experts_add_to_the_time_of_kernels_in_every_run(
    *,
    dispatcher: dict[str, Any],
    gpus: int,
    expert: int,
    pipeline: int,
    busiest: float | None,
    hidden: int,
    checkpointing: str,
    micro_batches: int,
) -> None:
    assume(expert <= gpus // pipeline)
    tables = tables_of(dispatcher, gpus=gpus, expert=expert)
    tables["model"]["hidden_size"] = hidden
    tables["train"]["gradient_accumulation_steps"] = micro_batches
    tables["parallel"] |= {"pipeline": pipeline, "data": gpus // pipeline}
    tables["activations"] = {"checkpointing": checkpointing}
    if busiest is not None and dispatcher["moe_token_dispatcher_type"] == "alltoall":
        tables["experts"] = {"busiest": busiest}
    bound, outcome = Bounder().bound(tables), tried(tables)
    assert not outcome.refusal
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)
    assert outcome.memory_bytes >= bound.memory_bytes


@pytest.mark.parametrize("axes", [{"expert": 2}, {"expert": 8}, {"pipeline": 2}, {"tensor": 2}])
@pytest.mark.parametrize("experts", [True, False])
def test_a_bound_counts_the_communicators_of_the_schedule_or_fewer(
    axes: dict[str, int], *, experts: bool
) -> None:
    tables = tables_of({}, gpus=8, expert=axes.get("expert", 1))
    if not experts:
        del tables["model"]["experts"]
        tables["parallel"] = {"data": 8}
    degrees = {key: value for key, value in axes.items() if key != "expert"}
    tables["parallel"] |= {**degrees, "data": 8 // max(degrees.values(), default=1)}
    tables["zero"]["megatron"] = {"sequence_parallel": "tensor" in axes}
    if "tensor" in axes and experts:
        tables["parallel"]["expert_tensor"] = 1
    job = settled_source(tables).job()
    assert job.model is not None
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    counted = communicators_of(wire_bytes(job.model, strategy))
    assert counted <= min(communicators(job.schedule, each) for each in job.schedule.programs)
    assert counted >= sum(value > 1 for value in degrees.values())


def test_the_bound_of_a_step_with_expert_ranks_has_the_time_of_their_exchanges() -> None:
    alone, exchanged = (
        Bounder().bound(tables_of({"moe_token_dispatcher_type": "alltoall"}, gpus=16, expert=each))
        for each in (1, 16)
    )
    assert exchanged.busy_s > alone.busy_s
    assert exchanged.kernels_s > alone.kernels_s


@pytest.mark.parametrize("expert", [4, 16])
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "emulate": "fsdp2"},
        {"stage": 3, "emulate": "fsdp2", "fsdp2": {"reshard_after_forward": False}},
        {"stage": 1, "emulate": "deepspeed"},
        {"stage": 2, "emulate": "deepspeed", "deepspeed": {"overlap_comm": True}},
    ],
    ids=["fsdp2", "fsdp2 kept", "deepspeed 1", "deepspeed 2"],
)
def test_no_step_of_other_runtimes_with_expert_ranks_goes_below_its_bounds(
    zero: dict[str, Any], expert: int
) -> None:
    tables = {**tables_of({}, gpus=16, expert=expert), "zero": zero}
    bound, outcome = Bounder().bound(tables), tried(tables)
    assert not outcome.refusal
    assert not bound.why_not
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)
    assert outcome.memory_bytes >= bound.memory_bytes
