"""What must hold of every simulated run, whatever the schedule and the cluster."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from drawn import jobs
from drawn_clusters import NO_MODEL, clusters, harmless_schedules, links, troubles
from drawn_emulated import emulated_jobs
from drawn_examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from zsim.backend.backend import Job, NoRouteError
from zsim.cluster.profile.host_launch import NAMES, LaunchCosts
from zsim.runtimes.registry import make_schedule
from zsim.schedule.issue_order import issued
from zsim.trace.trace import Event, RankTrace, Trace
from zsim_des import SimBackend
from zsim_null import NullBackend


class Case:
    """A job to simulate; printed as what it was made of, without the schedule."""

    def __init__(self, made_of: str, job: Job) -> None:
        self.made_of = made_of
        self.job = job

    def __repr__(self) -> str:
        return f"Case({self.made_of})"


@st.composite
def hand_cases(draw: st.DrawFn) -> Case:
    made = draw(harmless_schedules())
    cluster, steps = draw(clusters(made.mesh.size)), draw(st.integers(1, 2))
    job = Job(schedule=made, model=NO_MODEL, cluster=cluster, steps=steps)
    size = len(made.programs[0].step)
    return Case(f"{made.mesh}, {size} operations, {cluster}, {steps} steps", job)


@st.composite
def zero_cases(draw: st.DrawFn) -> Case:
    model, strategy = draw(jobs())
    cluster, steps = draw(clusters(strategy.ranks)), draw(st.integers(1, 2))
    job = Job(schedule=make_schedule(model, strategy), model=model, cluster=cluster, steps=steps)
    return Case(f"{strategy} {cluster} {steps} steps", job)


any_cases = st.one_of(hand_cases(), zero_cases())


def by_rank(trace: Trace, job: Job) -> dict[int, RankTrace]:
    assert sum(rank.stands_for for rank in trace.ranks) == job.schedule.mesh.size
    return {rank.rank: rank for rank in trace.ranks}


@pytest.mark.one_commit_in(9)
@given(any_cases, st.data())
@examples(150)
def test_folded_and_unfolded_agree_to_the_picosecond(case: Case, data: st.DataObject) -> None:
    job = case.job
    trouble = data.draw(troubles(job.cluster, job.schedule.mesh.size))
    try:
        folded = SimBackend(faults=trouble[0], neighbours=trouble[1]).run(job, seed=0)
    except NoRouteError:
        with pytest.raises(NoRouteError):
            SimBackend(unfold=True, faults=trouble[0], neighbours=trouble[1]).run(job, seed=0)
        return
    backend = SimBackend(unfold=True, faults=trouble[0], neighbours=trouble[1])
    unfolded = backend.run(job, seed=0)
    assert folded.step_end_ps == unfolded.step_end_ps
    assert folded.links == unfolded.links
    assert folded.out_of_memory == unfolded.out_of_memory
    every = by_rank(unfolded, job)
    assert set(every) == set(range(job.schedule.mesh.size))
    for first, one in by_rank(folded, job).items():
        assert replace(one, stands_for=1) == every[first]
    # Each simulated rank is like one of the folded ones, and each of these stands for its number.
    alike = Counter((rank.role, rank.events) for rank in unfolded.ranks)
    stands = Counter[tuple[str, tuple[Event, ...]]]()
    for rank in folded.ranks:
        stands[rank.role, rank.events] += rank.stands_for
    assert alike == stands


@given(any_cases)
@examples(50)
def test_no_link_carries_more_than_its_bandwidth_allows(case: Case) -> None:
    job = case.job
    trace = SimBackend().run(job, seed=0)
    # Bytes of the last step move between the first start and the last end of its communication.
    ends = [
        (event.start_ps, event.end_ps)
        for rank in trace.ranks
        for event in rank.events
        if event.step == job.steps - 1
    ]
    if not ends:
        return
    span_ps = max(end for _, end in ends) - min(start for start, _ in ends)
    for use in trace.links:
        assert use.bytes * 10**12 <= use.count * use.capacity_bytes_per_s * span_ps


@given(any_cases)
@examples(50)
def test_bytes_on_links_are_the_ring_equivalent_bytes_of_the_transfers(case: Case) -> None:
    job = case.job
    trace = SimBackend().run(job, seed=0)
    sent = sum(
        rank.stands_for * transfer.bytes
        for rank in trace.ranks
        for transfer in rank.transfers
        if transfer.step == job.steps - 1
    )
    on_links = {use.link: use.bytes for use in trace.links}
    near = on_links.get("gpu->switch", 0)
    assert near == on_links.get("switch->gpu", 0)
    # Over PCIe there are Copies to the host and from it too.
    outward = on_links.get("pcie->host", 0) + on_links.get("pcie->root", 0)
    inward = on_links.get("host->pcie", 0) + on_links.get("root->pcie", 0)
    pcie = on_links.get("gpu->pcie", 0) - outward
    assert pcie == on_links.get("pcie->gpu", 0) - inward
    if job.cluster.host is not None and job.cluster.pcie_link is not None:
        drives = on_links.get("drives->host", 0) + on_links.get("host->drives", 0)
        passed, moved = on_links.get("host memory", 0), outward + inward + drives
        if job.schedule.host_threads:  # whose kernels pass it too
            assert passed > moved or not job.model.trained_count
        else:
            assert passed == moved
    out, spine = on_links.get("switch->nic", 0), on_links.get("leaf->spine", 0)
    if job.cluster.pcie_link is None:
        assert near == sent
    else:  # what another GPU relays passes links to the switch, at either end, and PCIe once
        assert pcie == out
        assert sent - out <= near <= sent + out
    assert out == on_links.get("nic->switch", 0) <= sent
    leaf = spine + on_links.get("leaf->network", 0)
    assert leaf == on_links.get("spine->leaf", 0) + on_links.get("network->leaf", 0) <= out
    assert on_links.get("spine->network", 0) == on_links.get("network->spine", 0) <= leaf


@pytest.mark.one_commit_in(12)
@given(hand_cases(), st.data())
@examples(50)
def test_a_backend_that_is_asked_again_answers_as_a_new_one(
    case: Case, data: st.DataObject
) -> None:
    """Whatever it kept from questions about other bandwidths, fabrics and faults."""
    ranks = case.job.schedule.mesh.size
    backend = SimBackend()
    asked = [case.job.cluster]
    for _ in range(4):
        before = asked[data.draw(st.integers(0, len(asked) - 1))]
        speeds = replace(before, switch_link=data.draw(links()), nic_link=data.draw(links()))
        cluster = data.draw(st.one_of(st.just(speeds), clusters(ranks)))
        asked.append(cluster)
        job = replace(case.job, cluster=cluster)
        faults, _ = data.draw(troubles(cluster, ranks))
        try:
            expected = SimBackend(faults=faults).step_ends_ps(job)
        except NoRouteError:
            with pytest.raises(NoRouteError):
                backend.step_ends_ps(job, faults=faults)
        else:
            assert backend.step_ends_ps(job, faults=faults) == expected


@given(any_cases)
@examples(50)
def test_streams_are_first_in_first_out_and_edges_are_kept(case: Case) -> None:
    job = case.job
    trace = SimBackend(unfold=True).run(job, seed=0)
    for rank in trace.ranks:
        program = job.schedule.program_of(rank.rank)
        ends: dict[tuple[int, str], int] = {}
        last: dict[str, int] = {}
        for event in rank.events:
            assert event.start_ps <= event.end_ps
            assert event.start_ps >= last.get(event.stream, event.start_ps)
            last[event.stream] = event.end_ps
            ends[event.step, event.operation] = event.end_ps
            operation = program.by_id[event.operation]
            for edge in getattr(operation, "after", ()):
                if isinstance(edge, str):
                    assert ends.get((event.step, edge), event.start_ps) <= event.start_ps


@st.composite
def emulated_cases(draw: st.DrawFn) -> Case:
    model, strategy = draw(emulated_jobs())
    costs: dict[str, Any] = {name: draw(st.sampled_from([0, 7, 10**6])) for name in NAMES}
    launch = LaunchCosts(**costs)
    cluster = draw(clusters(strategy.ranks))
    cluster = replace(cluster, gpu=replace(cluster.gpu, launch=launch))
    job = Job(schedule=make_schedule(model, strategy), model=model, cluster=cluster, steps=2)
    return Case(f"{strategy} {cluster}", job)


@given(st.one_of(emulated_cases(), zero_cases()))
@examples(20)
def test_nothing_starts_before_its_host_has_issued_all_up_to_it(case: Case) -> None:
    """Whoever limits it: host waits, branches, frees. And what streams wait for is no more."""
    job, costs = case.job, case.job.cluster.gpu.launch_costs
    for rank in SimBackend().run(job, seed=0).ranks:
        starts = {(event.step, event.operation): event.start_ps for event in rank.events}
        spent_ps = 0
        for step, operation in issued(job.schedule.program_of(rank.rank), job.steps):
            if step >= 0:
                spent_ps += costs.issue_ps(operation)
                assert starts.get((step, operation.id), spent_ps) >= spent_ps
        assert sum(rank.host_bound_ps) <= spent_ps


@pytest.mark.one_commit_in(6)
@given(zero_cases())
@examples(50)
def test_the_null_backend_records_the_same_operations_transfers_and_book(case: Case) -> None:
    job = case.job
    strategy = job.schedule.contract.strategy
    # When memory of a delayed update comes back depends on how long the host takes.
    assume(strategy is None or not strategy.offload.delayed_update)
    simulated = SimBackend().run(job, seed=0)
    recorded = NullBackend().run(job, seed=0)
    for one in simulated.ranks:
        (other,) = [rank for rank in recorded.ranks if rank.role == one.role]
        assert one.transfers == other.transfers
        assert one.book == other.book
        assert [event.operation for event in one.events] == [
            event.operation for event in other.events
        ]


@given(any_cases, st.integers(0, 2**32))
@examples(25)
def test_a_run_repeats_to_the_picosecond(case: Case, seed: int) -> None:
    job = case.job
    assert SimBackend().run(job, seed=seed) == SimBackend().run(job, seed=seed)
