"""A backend of another package, held to the suite that ships: one file and one entry point."""

from pathlib import Path

import pytest
from other_package import install_plant, plant_files, python, sources_that_name, zsim

from zsim.backend.backend import load_backend, names
from zsim.conformance.jobs import NAMES, job

OURS = ("null", "sim", "torch")
MORE = "forgetful = metronome:Forgetful\nsilent = metronome:Silent\n"
WRONG = """

class Forgetful(Metronome):
    name = "forgetful"

    def run(self, job, *, seed):
        trace = super().run(job, seed=seed)
        ranks = tuple(replace(rank, transfers=rank.transfers[1:]) for rank in trace.ranks)
        return replace(trace, ranks=ranks)


class Silent:
    name = "silent"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = install_plant(tmp_path_factory.mktemp("site"), "backend")
    with (site / "backend-1.0.dist-info" / "entry_points.txt").open("a", encoding="utf-8") as file:
        file.write(MORE)
    with (site / "metronome.py").open("a", encoding="utf-8") as file:
        file.write(WRONG)
    return site


def test_a_backend_needs_two_files_and_none_of_zsim() -> None:
    assert plant_files("backend") == {"metronome.py", "entry_points.txt"}
    assert sources_that_name("metronome") == []


def test_all_of_our_backends_are_registered_load_and_refuse_no_job_of_the_suite() -> None:
    assert set(names()) >= set(OURS)
    for backend in OURS:
        assert load_backend(backend).name == backend
    for backend in ("null", "sim"):
        assert {load_backend(backend)().refusal(job(name)) for name in NAMES} == {None}


@pytest.mark.one_commit_in(15)
def test_it_runs_a_scenario_and_passes_the_suite(installed: Path) -> None:
    ran = zsim(installed, "run", "tiny", "--backend", "metronome")
    assert ran.returncode == 0, ran.stderr
    tested = python(installed, "-m", "zsim.conformance", "metronome", cwd=installed)
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout
    assert "skipped" not in tested.stdout


@pytest.mark.one_commit_in(12)
def test_one_that_loses_a_transfer_fails_it(installed: Path) -> None:
    tested = python(installed, "-m", "zsim.conformance", "forgetful", cwd=installed)
    assert tested.returncode == 1
    assert "test_communicators_are_handed_the_same_in_the_same_order[" in tested.stdout


@pytest.mark.one_commit_in(12)
def test_one_that_does_not_say_what_it_is_and_one_that_is_not_there_are_refused(
    installed: Path, tmp_path: Path
) -> None:
    refused = python(installed, "-m", "zsim.conformance", "silent")
    assert refused.returncode == 2
    assert "backend 'silent': its class attribute traits must be a BackendTraits" in refused.stderr
    refused = zsim(installed, "run", "tiny", "--backend", "metronome", "--poison")
    assert refused.returncode == 2
    assert "--poison: backend metronome has no memory to poison" in refused.stderr
    refused = python(tmp_path, "-m", "zsim.conformance", "metronome")
    assert "backend: 'metronome' must be one of null, sim, torch" in refused.stderr
