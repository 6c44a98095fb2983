"""What the ranks of a node hold of host memory, and whether the node has it."""

from dataclasses import replace

import pytest
from drawn_clusters import NO_MODEL

from zsim.analysis.memory_footprint import footprint
from zsim.analysis.summary import summary
from zsim.analysis.tier_fit import MODEL_BUILT, TierUse
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.cluster.host_side import Host
from zsim.memory.host_setup import HostSetup
from zsim.model.model import Parameter
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.schedule import Discipline, Kind, Place, Pool, Schedule
from zsim_des import SimBackend

NODE = Cluster(
    name="node",
    nodes=2,
    gpus_per_node=4,
    gpu=Gpu(name="any", memory_bytes=10**9, memory_bytes_per_s=10**9, rates=()),
    switch_link=Link(bytes_per_s=10**9),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=10**9),
    host=Host(memory_bytes=10_000, memory_bytes_per_s=10**9),
)
WEIGHTS = replace(NO_MODEL.units[0], parameters=(Parameter(name="weight", shape=(10, 10)),))
MODEL = replace(NO_MODEL, units=(WEIGHTS,))


def schedule(*, pinned: int, pageable: int = 0) -> Schedule:
    """8 ranks that hold so many elements of 4 bytes of host memory from set-up on."""
    build = ScheduleBuilder.of("tiers", data=8)
    build.pools += [Pool(name=name, place=Place.HOST) for name in ("host", "pageable")]
    master = build.buffer("master", pinned, pool="host", kind=Kind.MASTER, persistent=True)
    moment = build.buffer("moment", pageable, pool="pageable", kind=Kind.MOMENT, persistent=True)
    build.setup.allocate(master, moment)
    return build.schedule()


def host_use(job: Job) -> TierUse:
    """Return the use of host memory, as the plan and as a run has it."""
    planned = footprint(job)
    ran = summary(job, SimBackend().run(job, seed=0))
    assert planned.tiers == ran.tiers
    assert planned.fits == ran.fits
    return planned.tiers[0]


def test_the_ranks_of_a_node_share_its_host_memory() -> None:
    use = host_use(Job(schedule=schedule(pinned=100, pageable=200), model=MODEL, cluster=NODE))
    assert (use.needed_bytes, use.capacity_bytes, use.fits) == (4 * 1200, 10_000, True)
    assert use.consumers == (("moment", 3200), ("master", 1600))


def test_pools_that_fit_each_for_itself_may_not_fit_together() -> None:
    job = Job(schedule=schedule(pinned=400, pageable=500), model=MODEL, cluster=NODE)
    use = host_use(job)
    assert not use.fits
    assert use.text() == (
        "14.4 kB on a node of 10 kB, does not fit: most is moment 8 kB, master 6.4 kB "
        "(largest on a rank: moment 2 kB)"
    )


def test_pinned_memory_has_a_limit_of_its_own() -> None:
    assert NODE.host is not None
    limited = replace(NODE, host=replace(NODE.host, pinned_bytes=1500))
    job = Job(schedule=schedule(pinned=100, pageable=200), model=MODEL, cluster=limited)
    every, pinned = footprint(job).tiers
    assert (every.fits, every.pinned) == (True, False)
    assert (pinned.fits, pinned.needed_bytes, pinned.name) == (False, 1600, "pinned host memory")
    assert not footprint(job).fits


@pytest.mark.parametrize(
    ("setup", "built"),
    [(HostSetup.SHARDED, 0), (HostSetup.ONE_RANK, 400), (HostSetup.EVERY_RANK, 1600)],
)
def test_set_up_holds_the_model_as_it_is_built_beside_what_it_allocates(
    setup: HostSetup, built: int
) -> None:
    job = Job(schedule=schedule(pinned=100), model=MODEL, cluster=NODE, setup=setup)
    use = host_use(job)
    assert use.needed_bytes == 4 * 400 + built
    assert dict(use.consumers).get(MODEL_BUILT, 0) == built


def test_a_model_that_is_built_whole_on_every_rank_may_be_all_that_does_not_fit() -> None:
    tight = replace(NODE, host=Host(memory_bytes=1500, memory_bytes_per_s=1))
    empty = ScheduleBuilder.of("nothing", data=8).schedule()
    job = Job(schedule=empty, model=MODEL, cluster=tight, setup=HostSetup.EVERY_RANK)
    use = host_use(job)
    assert (use.fits, use.consumers) == (False, ((MODEL_BUILT, 1600),))


def test_the_node_counts_whose_ranks_need_most() -> None:
    build = ScheduleBuilder.of("roles", data=8)
    build.pools.append(Pool(name="host", place=Place.HOST))
    for name, start, stop, elements in (("few", 0, 6, 10), ("many", 6, 8, 100)):
        part = build.role(name, Span(axis="data", start=start, end=stop))
        buffer = part.buffer("master", elements, pool="host", kind=Kind.MASTER, persistent=True)
        part.setup.allocate(buffer)
    use = host_use(Job(schedule=build.schedule(), model=MODEL, cluster=NODE))
    assert use.needed_bytes == 4 * (2 * 10 + 2 * 100)  # ranks 4 to 7


def rounding(elements: int) -> TierUse:
    """Return the use of host memory where pinned sizes are rounded up and kept."""
    exact = schedule(pinned=elements)
    pools = tuple(
        replace(pool, discipline=Discipline.CACHING) if pool.name == "host" else pool
        for pool in exact.pools
    )
    return host_use(Job(schedule=replace(exact, pools=pools), model=MODEL, cluster=NODE))


def test_memory_that_is_rounded_up_is_told_where_it_does_not_fit() -> None:
    use = rounding(520)
    assert (use.fits, use.rounded_bytes) == (False, 4 * (4096 - 4 * 520))
    assert use.text().endswith(
        "8.06 kB is pinned memory rounded up to powers of two, as PyTorch does"
    )
    even = rounding(1024)
    assert (even.fits, even.rounded_bytes) == (False, 0)
    assert "rounded" not in even.text()
