"""The step that a peer was given, against what it answered.

ASTRA-sim 2 with its analytical network: 96 layers of 3,623,878,656 bytes, ZeRO-3 over all ranks, 16
GPUs per node on a switch of 300 GB/s (500 ns per hop, two hops), one NIC of 12.5 GB/s for each GPU
(2,500 ns per hop, two hops), a ring in each of the two dimensions, 4 chunks, one collective at a
time. Its simulated seconds are typed in below.
"""

from dataclasses import replace

import pytest
from drawn_clusters import NO_MODEL

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.network.link_load import Decision
from zsim.schedule.builder import COMMUNICATION, ScheduleBuilder
from zsim.schedule.schedule import Schedule
from zsim_des import SimBackend

LAYERS, LAYER_BYTES, GPUS_PER_NODE = 96, 3_623_878_656, 16
COMMUNICATION_BOUND_MS = (15, 30, 5)  # forward and backward of a layer, update
COMPUTE_HEAVY_MS = (150, 450, 50)
COMPUTE_S = 57.65  # of the compute-heavy step: 96 x 0.6 + 0.05
LIKE_THE_PEER = Decision(algorithm="hierarchical", chunks=4)

STEP_S = {64: 4.7981, 400: 6.0068, 512: 6.0922}
"""ASTRA-sim 2, analytical: seconds of the communication-bound step, by GPUs."""
HEAVY_STEP_S = {64: 57.6995, 400: 57.7122, 512: 57.7131, 1024: 57.7158}
"""ASTRA-sim 2, analytical: seconds of the compute-heavy step, by GPUs."""

# The way from a GPU to the network passes the switch here: 500 + 2,000 ns for the peer's 2,500.
CLUSTER = Cluster(
    name="16 per node",
    nodes=1,
    gpus_per_node=GPUS_PER_NODE,
    gpu=Gpu(name="1 GB/s", memory_bytes=10**13, memory_bytes_per_s=10**9, rates=()),
    switch_link=Link(bytes_per_s=300 * 10**9, latency_ps=500_000),
    nics_per_node=GPUS_PER_NODE,
    nic_link=Link(bytes_per_s=12_500_000_000, latency_ps=2_000_000),
)


class Workload:
    """The step, node by node in the peer's order, which is the order on both streams."""

    def __init__(self, gpus: int, milliseconds: tuple[int, int, int], scatter_on: str) -> None:
        shard_bytes = -(-LAYER_BYTES // (4 * gpus)) * 4
        self.build = ScheduleBuilder.of("96 layers", data=gpus)
        self.group = self.build.group("data", "data")
        # Reductions have a communicator of their own: what runs at once is up to the streams.
        self.reductions = self.build.group("reductions", "data")
        self.shard = self.build.buffer("shard", shard_bytes // 4)
        self.whole = self.build.buffer("whole", shard_bytes // 4 * gpus)
        self.step = self.build.step
        self.scatter_on = scatter_on
        self.works = [  # a millisecond is a million bytes at 1 GB/s
            self.build.buffer(f"work{index}", each * 250_000)
            for index, each in enumerate(milliseconds)
        ]
        self.step.allocate(self.shard, self.whole, *self.works)

    def gather(self, name: str, *after: str) -> str:
        return self.step.all_gather(
            name, self.group, self.shard.all, self.whole.all, after=list(after)
        )

    def scatter(self, name: str, *after: str) -> str:
        return self.step.reduce_scatter(
            name,
            self.reductions,
            self.whole.all,
            self.shard.all,
            stream=self.scatter_on,
            after=list(after),
        )

    def work(self, name: str, kind: int, *after: str) -> str:
        return self.step.fill(name, self.works[kind].all, 0.0, after=list(after))

    def schedule(self) -> Schedule:
        gathered = [self.gather("gather0")]
        done: list[str] = []
        for layer in range(LAYERS):
            if layer + 1 < LAYERS:
                gathered.append(self.gather(f"gather{layer + 1}", gathered[-1], *done[-1:]))
            done.append(self.work(f"forward{layer}", 0, gathered[layer], *done[-1:]))
        again = self.gather(f"again{LAYERS - 1}", gathered[-1], done[-1])
        computed, scattered = done[-1], list[str]()
        for layer in reversed(range(LAYERS)):
            here = again
            if layer:
                again = self.gather(f"again{layer - 1}", here, computed)
            computed = self.work(f"backward{layer}", 1, here, computed)
            scattered.append(self.scatter(f"scatter{layer}", computed, *scattered[-1:]))
        self.work("update", 2, scattered[-1], computed)
        return self.build.schedule()


def step_s(
    gpus: int,
    milliseconds: tuple[int, int, int],
    *,
    faster: int = 1,
    scatter_on: str = COMMUNICATION,
) -> float:
    """Simulated seconds, with links `faster` times as fast."""
    workload = Workload(gpus, milliseconds, scatter_on)
    if scatter_on not in workload.build.streams:
        workload.build.stream(scatter_on)
    switch, nic = CLUSTER.switch_link, CLUSTER.nic_link
    cluster = replace(
        CLUSTER,
        nodes=gpus // GPUS_PER_NODE,
        switch_link=replace(switch, bytes_per_s=switch.bytes_per_s * faster),
        nic_link=replace(nic, bytes_per_s=nic.bytes_per_s * faster),
    )
    job = Job(schedule=workload.schedule(), model=NO_MODEL, cluster=cluster)
    (end_ps,) = SimBackend(decision=LIKE_THE_PEER).step_ends_ps(job)
    return end_ps / 1e12


def agrees(gpus: int, *, faster: int = 1) -> bool:
    """Whether the communication-bound step is within 2 % of the peer's."""
    found = step_s(gpus, COMMUNICATION_BOUND_MS, faster=faster)
    return found == pytest.approx(STEP_S[gpus], rel=0.02)


@pytest.mark.parametrize("gpus", STEP_S)
def test_the_communication_bound_step_is_as_the_peer_says(gpus: int) -> None:
    assert agrees(gpus)


@pytest.mark.parametrize("gpus", HEAVY_STEP_S)
def test_the_compute_heavy_step_exposes_what_the_peer_says(gpus: int) -> None:
    exposed_s = step_s(gpus, COMPUTE_HEAVY_MS) - COMPUTE_S
    assert exposed_s == pytest.approx(HEAVY_STEP_S[gpus] - COMPUTE_S, rel=0.1)


@pytest.mark.parametrize("gpus", STEP_S)
def test_a_network_without_limits_does_not_agree(gpus: int) -> None:
    assert not agrees(gpus, faster=10**6)
    exposed_s = step_s(gpus, COMPUTE_HEAVY_MS, faster=10**6) - COMPUTE_S
    assert exposed_s != pytest.approx(HEAVY_STEP_S[gpus] - COMPUTE_S, rel=0.1)


@pytest.mark.parametrize("gpus", STEP_S)
def test_collectives_that_may_overlap_hide_their_latencies_but_no_bytes(gpus: int) -> None:
    """5 to 6 % less: while one passes its hops and fills its stages, the other has the links.

    Alone, a collective's slower stage is idle during the hops and the first chunk of the faster
    one. Two that run at once share the NICs, and each fills what the other leaves idle. The peer
    lets no two run at once, even on different links.
    """
    alone_s = step_s(gpus, COMMUNICATION_BOUND_MS)
    together_s = step_s(gpus, COMMUNICATION_BOUND_MS, scatter_on="reductions")
    assert 0.05 < 1 - together_s / alone_s < 0.06
    # Three collectives of each layer leave every node through 16 NICs, (n - 1) / n of the bytes.
    nodes = gpus // GPUS_PER_NODE
    nics_s = 3 * LAYERS * LAYER_BYTES * (nodes - 1) / nodes / (GPUS_PER_NODE * 12.5e9)
    assert together_s > nics_s
