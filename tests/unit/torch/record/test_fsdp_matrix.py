"""FSDP2 of the pinned torch: no finding, and each of its waits is needed or implied by another."""

from dataclasses import fields

import pytest
from dropped_waits import WaitSite, waits_seen
from fsdp_matrix import RUNS, VALUES, WORLD, FsdpRun, train
from fsdp_waits import FOUND, IMPLIED

from zsim_torch import recording

DRAWN = {
    "fsdp, offload, bf16",
    "fsdp, accumulation, reduced each time",
    "fsdp, frozen",
    "fsdp, unshard ahead",
    "hsdp, accumulation, all-reduced last",
    "hsdp, prefetch, bf16",
}
"""Runs of which each commit of the suite has one, beside those of values; the rest is long."""
DRAWN_SITES = {"wait_stream(current_stream)", "grad_offload_event.synchronize()"}
"""Ends of the lines whose waits the suite drops; those of the others are dropped under `long`."""


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


def test_every_wait_of_fsdp2_is_in_the_lists() -> None:
    seen: set[WaitSite] = set()
    for name in ("fsdp, frozen", "hsdp, offload, bf16"):
        with recording(world=WORLD), waits_seen() as sites:
            train(RUNS[name])
        seen |= sites
    assert seen == FOUND.keys() | IMPLIED.keys()


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("site", "name"),
    [
        pytest.param(
            site,
            name,
            id=" ".join(site),
            marks=() if site.source.endswith(tuple(DRAWN_SITES)) else pytest.mark.long,
        )
        for site, name in FOUND.items()
    ],
)
def test_a_wait_of_fsdp2_that_is_dropped_is_missed(site: WaitSite, name: str) -> None:
    with recording(world=WORLD) as tape, waits_seen(lambda each: each == site):
        train(RUNS[name])
    assert tape.findings


@pytest.mark.parametrize("name", ["fsdp", "hsdp, bf16"])
def test_waits_that_others_imply_can_all_be_dropped(name: str) -> None:
    with recording(world=WORLD) as tape, waits_seen(lambda each: each in IMPLIED):
        train(RUNS[name])
    assert tape.findings == []
