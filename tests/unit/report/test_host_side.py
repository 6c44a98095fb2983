"""Host side on the page of a run: time that waits for it, and where its traffic is drawn."""

import pytest

import zsim
from zsim.analysis.exposed_time import HostSide
from zsim.analysis.summary import last_step, summary
from zsim.analysis.time_breakdown import Breakdown, breakdown
from zsim.backend.backend import Job
from zsim.cluster.host_links import HostWork
from zsim.report.network_section import network
from zsim.report.svg.cluster_drawing import draw
from zsim.report.time_section import parts, split
from zsim.trace.trace import Trace
from zsim_des import SimBackend

IN_FILES = {"offload.optimizer": "nvme", "train.steps": 1}


@pytest.fixture(scope="module")
def job() -> Job:
    return zsim.load("tiny", IN_FILES).job


@pytest.fixture(scope="module")
def trace(job: Job) -> Trace:
    return SimBackend().run(job, seed=0)


@pytest.fixture(scope="module")
def found(job: Job, trace: Trace) -> Breakdown:
    rank = trace.ranks[0]
    program = job.schedule.program_of(rank.rank)
    host_side = HostSide(job.schedule, program)
    return breakdown(program, rank, *last_step(trace), host_side=host_side)


def test_kernels_of_the_host_are_no_compute_of_the_gpu(
    job: Job, trace: Trace, found: Breakdown
) -> None:
    rank = trace.ranks[0]
    program = job.schedule.program_of(rank.rank)
    all_together = breakdown(program, rank, *last_step(trace))
    on_host = dict(found.on_host_ps)
    assert on_host[HostWork.KERNELS] > 0
    assert HostWork.FILES not in on_host  # of a model this small kernels hide them all
    assert found.compute_ps < all_together.compute_ps
    assert found.idle_ps == all_together.idle_ps
    assert sum(ps for _, _, ps in parts(found, ["data"])) == found.span_ps


def test_the_page_says_what_of_the_host_side_a_rank_waits_for(
    job: Job, trace: Trace, found: Breakdown
) -> None:
    section = split(job, trace)
    (sentence,) = section.sentences
    assert "; it waits for its host side: kernels on the host " in sentence
    assert section.figure is not None
    names = {series.name for series in section.figure.series}
    assert {f"waiting for {work}" for work, _ in found.on_host_ps} <= names


def test_drives_are_drawn_with_the_colour_of_their_traffic_where_there_is_some(
    job: Job, trace: Trace
) -> None:
    picture = network(job, trace, summary(job, trace)).picture
    assert picture is not None
    assert "8 drives</text>" in picture
    assert "host memory, " in picture
    quiet = draw(job.cluster, None, {"gpu->switch": 0.5})
    assert "drives</text>" not in quiet
    busy = draw(job.cluster, None, {"drives->host": 0.9})
    assert busy.count("#c81e1e") == quiet.count("#c81e1e") + 1
