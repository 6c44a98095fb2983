"""A scenario takes as long with every rank simulated as with one of each class."""

from fractions import Fraction

import pytest
from drawn_examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from zsim import MistakeError, load
from zsim.backend.backend import Job, RefusedError
from zsim.cluster.fault import DeadNic, SlowGpu, SlowNic, Window
from zsim.network.link_load import Decision
from zsim_des import SimBackend

NODES = (
    "dgx2",
    "dgx_a100",
    "dgx_h100",
    "p4d",
    "p5",
    "azure_nd_a100_v4",
    "grand_teton_h100",
    "h200_4_infiniband",
    "workstation_4x4090",
)
BASE: dict[str, object] = {
    "title": "Blocks of Llama 2 7B",
    "model": {"name": "llama2-7b"},
    "cluster": {},
    "zero": {},
    "train": {"micro_batch_size": 1, "gradient_accumulation_steps": 1},
}
LATER = Window(start_ps=10**18)
"""Begins when all is over."""

common: dict[str, st.SearchStrategy[object]] = {
    "cluster.node": st.sampled_from(NODES),
    "cluster.fabric": st.sampled_from(["single_switch", "rail_optimized", "fat_tree_2"]),
    "cluster.nodes": st.integers(1, 4),
    "model.layers": st.integers(1, 3),
    "parallel.tensor": st.sampled_from([1, 2, 4, 4]),
    "parallel.data": st.sampled_from([1, 2, 4, 8]),
    "train.precision": st.just("fp16"),
    "zero.stage": st.just(3),
}
other: dict[str, st.SearchStrategy[object]] = {
    "activations.checkpointing": st.sampled_from(["none", "full"]),
    "cluster.gpu_memory": st.sampled_from(["3 GB", "5 GB", "8 GB"]),
    "compute.profile": st.just("h100"),
    "network.profile": st.just("h100"),
    "train.clip_norm": st.just(1.0),
    "train.gradient_accumulation_steps": st.integers(1, 3),
    "train.micro_batch_size": st.sampled_from([1, 2, 4]),
}
own = st.fixed_dictionaries(
    {
        **common,
        "offload.optimizer": st.sampled_from(["device", "host", "host"]),
        "offload.parameters": st.sampled_from(["device", "host"]),
    },
    optional={
        **other,
        "parallel.replicate": st.integers(1, 2),
        "zero.bucket_elements": st.sampled_from([10**7, 10**8]),
        "zero.prefetch_units": st.integers(0, 3),
    },
)
device = st.sampled_from(["none", "cpu", "cpu"])
deepspeed = st.fixed_dictionaries(
    {
        **common,
        "zero.emulate": st.just("deepspeed"),
        "zero.deepspeed.offload_optimizer.device": device,
        "zero.deepspeed.offload_param.device": device,
    },
    optional=other,
)
fsdp = st.fixed_dictionaries(
    {
        **common,
        "zero.emulate": st.just("fsdp2"),
        "zero.fsdp2.offload_policy": st.sampled_from(["none", "cpu"]),
    },
    optional=other,
)
changes = own | deepspeed | fsdp


def agree(drawn: dict[str, object], rank: int, *, most: int) -> None:
    """Assert that folded, unfolded, and with a fault that comes too late, a run takes as long.

    At most `most` operations are simulated when every rank is.
    """
    try:
        source = load(BASE, drawn).source
        job: Job = source.job()
        decision: Decision | None = source.decision
        folded = SimBackend(decision=decision).step_ends_ps(job)
    except (MistakeError, RefusedError):
        assume(False)
        return
    ranks = job.schedule.mesh.size
    assume(ranks * len(job.schedule.programs[0].step) < most)
    late = (
        SlowGpu(rank=rank % ranks, factor=Fraction(2), window=LATER),
        SlowNic(node=0, nic=0, factor=Fraction(2), window=LATER),
        DeadNic(node=0, nic=0, window=LATER),
    )
    assert SimBackend(decision=decision, faults=late).step_ends_ps(job) == folded
    assert SimBackend(decision=decision, unfold=True).step_ends_ps(job) == folded


@pytest.mark.one_commit_in(6)
@given(changes, st.integers(0, 127))
@examples(6)
def test_a_scenario_takes_as_long_unfolded(drawn: dict[str, object], rank: int) -> None:
    agree(drawn, rank, most=10_000)


@pytest.mark.long
@pytest.mark.timeout(7200)
@given(changes, st.integers(0, 127))
@examples(1000)
def test_a_thousand_scenarios_take_as_long_unfolded(drawn: dict[str, object], rank: int) -> None:
    agree(drawn, rank, most=60_000)
