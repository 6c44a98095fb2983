"""An algorithm of another package, with constants of its own: one file and one entry point."""

import json
from pathlib import Path

import pytest
from other_package import answers, install_plant, plant_files, python, sources_that_name, zsim

PROFILED = ("--set", "network.profile=h100", "--json")
TIMES = """
import sys
from zsim.files.installed import network_profile
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.algorithm.installed_algorithms import check
from zsim.network.tuner import choose

links = Bandwidths(gpu=450 * 10**9, node=400 * 10**9, pair=50 * 10**9)
profile = network_profile("h100").changed(**eval(sys.argv[1]))
check(profile)
found = choose(profile, Collective.ALL_GATHER, 2**14, GroupShape(ranks=512, nodes=64), links=links)
print(found.algorithm, found.latency_ps)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_plant(tmp_path_factory.mktemp("site"), "algorithm")


def test_an_algorithm_needs_two_files_and_none_of_zsim() -> None:
    assert plant_files("algorithm") == {"aggregated_trees.py", "entry_points.txt"}
    assert sources_that_name("pat") == []


@pytest.mark.one_commit_in(9)
def test_it_is_forced_and_chosen_where_it_is_faster(installed: Path) -> None:
    # On 64 nodes nine steps are fewer than the 511 of a ring.
    base = ["run", "llama2_7b", *PROFILED, "--set", "cluster.nodes=64"]
    forced = [[*base, "--set", f"network.algorithm={name}"] for name in ("ring", "pat")]
    step_s: list[float] = []
    for ran in answers(installed, *forced, base):
        assert ran.returncode == 0, ran.stderr
        step_s.append(json.loads(ran.stdout)["step_time_s"])
    ring, pat, chosen = step_s
    assert chosen <= min(ring, pat)
    assert pat != ring


@pytest.mark.one_commit_in(12)
def test_its_constants_have_defaults_and_may_be_in_a_profile(installed: Path) -> None:
    default, slower = (
        python(installed, "-c", TIMES, text).stdout.split()
        for text in ("{}", "{'pat_hop_s': 4e-5}")
    )
    assert default[0] == "pat"
    assert slower[0] != "pat" or int(slower[1]) > int(default[1])
    refused = python(installed, "-c", TIMES, "{'pat': 1.5}")
    assert "pat: 1.5 must be at most 1, it is a share" in refused.stderr


@pytest.mark.one_commit_in(9)
def test_without_it_the_algorithms_that_there_are_are_named(
    installed: Path, tmp_path: Path
) -> None:
    refused = zsim(tmp_path, "run", "tiny", "--set", "network.algorithm=pat")
    assert refused.returncode == 2
    assert "'pat' must be 'ring', 'tree', 'nvls' or 'hierarchical'" in refused.stderr
    refused = python(tmp_path, "-c", TIMES, "{'pat': 0.5}")
    assert "pat is not a constant" in refused.stderr
