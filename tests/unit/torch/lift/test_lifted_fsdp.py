"""What FSDP2 was seen to do is what zsim says that it does; and is proved."""

from dataclasses import replace
from typing import Any

import pytest
from faults.of_executor.dropped_waits import WaitSite, waits_seen
from faults.of_executor.fsdp_waits import FOUND
from fsdp_matrix import RUNS, WORLD, train
from fsdp_order import issued
from lifted_fsdp import BothJobs, both_jobs

from zsim.analysis.memory_footprint import footprint
from zsim.proof import prove
from zsim.schedule.schedule import Schedule
from zsim_record import recording

pytestmark = pytest.mark.matrix(3, together=True)
BOTH: dict[str, dict[str, Any]] = {
    "always": {"reshard": None},
    "never": {"reshard": False},
    "hybrid": {"reshard": None, "replicas": 2},
}


@pytest.fixture(scope="module", params=BOTH)
def both(request: pytest.FixtureRequest) -> BothJobs:
    return both_jobs(**BOTH[request.param])


def sent(schedule: Schedule) -> dict[tuple[int, str], int]:
    """Return the bytes that a rank sends in a step, by size of the group and collective."""
    sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
    volume = schedule.contract.wire_bytes
    assert volume is not None
    return {(sizes[each.group], each.collective): each.bytes for each in volume}


@pytest.mark.one_commit_in(4)
def test_a_recording_issues_the_collectives_of_the_emulation_in_its_order(both: BothJobs) -> None:
    assert list(issued(both.lifted.schedule)) == list(issued(both.emulated.schedule))


def test_a_recording_sends_the_bytes_of_the_emulation(both: BothJobs) -> None:
    assert sent(both.lifted.schedule) == sent(both.emulated.schedule)


def test_a_recording_needs_the_memory_of_the_emulation(both: BothJobs) -> None:
    """Tensor by tensor: the book of an emulation has backward of a unit at once, and is more."""
    lifted, emulated = footprint(both.lifted), footprint(both.emulated)
    assert lifted.needed_bytes == pytest.approx(emulated.needed_bytes, rel=0.01)
    assert lifted.allocated_bytes <= emulated.allocated_bytes * 1.01


def test_a_recording_is_proved(both: BothJobs) -> None:
    proof = prove(both.lifted.schedule)
    assert proof.findings == ()
    assert {each.split()[0] for each in proof.proved} == {"order", "places", "memory", "volume"}
    assert proof.not_shown == ("values: the contract names no parameters",)


DRAWN = ("hsdp, accumulation, all-reduced last",)
"""Runs of the matrix that the suite lifts; all of them are under `long`."""
LIFTED = [name for name in RUNS if "offload" not in name]


@pytest.mark.one_commit_in(5)
@pytest.mark.parametrize(
    "name",
    [name if name in DRAWN else pytest.param(name, marks=pytest.mark.long) for name in LIFTED],
)
def test_fsdp2_is_proved_as_it_was_recorded(name: str) -> None:
    with recording(world=WORLD, lifts=True) as tape:
        train(replace(RUNS[name], steps=3))
    schedule = tape.schedule(name)
    assert prove(schedule).findings == ()
    ((_, _, peak),) = schedule.contract.peak_bytes
    assert 0 < peak <= tape.peak_bytes


FAMILIES = {"race": "races", "reuse": "lifetime"}
"""Families of proofs by the kind of finding that a recording has for the same mistake."""
SITES = [(site, name) for site, name in FOUND.items() if "offload" not in name]


@pytest.mark.one_commit_in(6)
@pytest.mark.parametrize(
    ("site", "name"),
    [
        pytest.param(*each, marks=() if number == 4 else pytest.mark.long)
        for number, each in enumerate(SITES)
    ],
    ids=[" ".join(site) for site, _ in SITES],
)
def test_a_proof_misses_the_dropped_wait_that_a_recording_misses(site: WaitSite, name: str) -> None:
    with recording(world=WORLD, lifts=True) as tape, waits_seen(lambda each: each == site):
        tape.hazards.assumes = False  # no edge but those of the script
        train(replace(RUNS[name], steps=5))
    seen = {FAMILIES[hazard.kind] for hazard in tape.findings}
    proved = {finding.invariant for finding in prove(tape.schedule(name)).findings}
    assert seen & proved
    assert proved <= set(FAMILIES.values())
