"""FSDP2 of the pinned torch: no finding, and each of its waits is needed or implied by another."""

from dataclasses import fields

import pytest
from faults.fault import Fault
from faults.judge import Outcome, judge
from faults.of_executor.dropped_waits import WaitSite, waits_seen
from faults.of_executor.fsdp_waits import FOUND, IMPLIED
from faults.of_executor.recordings import FsdpRun as DroppedWaitRun
from faults.of_executor.registry import WAITS_OF_FSDP2
from fsdp_matrix import RUNS, VALUES, WORLD, FsdpRun, train

from zsim_record import recording

DRAWN = {
    "fsdp, offload, bf16",
    "fsdp, accumulation, reduced each time",
    "fsdp, frozen",
    "fsdp, unshard ahead",
    "hsdp, accumulation, all-reduced last",
    "hsdp, prefetch, bf16",
}
"""Runs of which each commit of the suite has one, beside those of values; the rest is long."""


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", VALUES)
def test_fsdp2_has_no_finding_with_any_value_of_an_option(name: str) -> None:
    assert_no_finding(VALUES[name])


def test_runs_of_values_have_each_value_that_a_run_of_the_matrix_has() -> None:
    for option in fields(FsdpRun):
        values = {getattr(run, option.name) for run in RUNS.values()}
        assert values <= {getattr(run, option.name) for run in VALUES.values()}, option.name


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    "name", [name if name in DRAWN else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_fsdp2_has_no_finding(name: str) -> None:
    assert_no_finding(RUNS[name])


def assert_no_finding(run: FsdpRun) -> None:
    with recording(world=WORLD) as tape:
        train(run)
    assert tape.findings == []
    assert tape.refused == {}
    assert tape.operation_count > 500


@pytest.mark.one_commit_in(2)
def test_every_wait_of_fsdp2_is_in_the_lists() -> None:
    seen: set[WaitSite] = set()
    for name in ("fsdp, frozen", "hsdp, offload, bf16"):
        with recording(world=WORLD), waits_seen() as sites:
            train(RUNS[name])
        seen |= sites
    assert seen == FOUND.keys() | IMPLIED.keys()


@pytest.mark.matrix(6)
@pytest.mark.parametrize("fault", WAITS_OF_FSDP2, ids=str)
def test_a_wait_of_fsdp2_that_is_dropped_is_missed(fault: Fault[str, WaitSite]) -> None:
    (run,) = (DroppedWaitRun(name) for name in set(FOUND.values()) if fault.applies(name))
    (mutant,) = fault.mutants(run.subject)
    assert judge(fault, mutant, run).outcome is Outcome.FOUND


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["fsdp", "hsdp, bf16"])
def test_waits_that_others_imply_can_all_be_dropped(name: str) -> None:
    with recording(world=WORLD) as tape, waits_seen(lambda each: each in IMPLIED):
        train(RUNS[name])
    assert tape.findings == []
