"""A kind of fabric of another package: one file, one entry point, and data."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from other_package import answers, install_plant, plant_files, sources_that_name, zsim

FILE = """
title = "A hypercube of 16 nodes"
kind = "hypercube"
source = "made up"
bits = 4
bandwidth_per_direction = "100 GB/s"
latency = "1 us"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = install_plant(tmp_path_factory.mktemp("site"), "fabric")
    (site / "hypercube.toml").write_text(FILE, "utf-8")
    return site


def test_a_kind_of_fabric_needs_two_files_and_none_of_zsim() -> None:
    assert plant_files("fabric") == {"hypercube.py", "entry_points.txt"}
    assert sources_that_name("hypercube") == []


def topology(site: Path, *words: str) -> Mapping[str, object]:
    fabric = ("--fabric", str(site / "hypercube.toml"), "--nodes", "16")
    ran = zsim(site, "topology", "dgx_h100", *fabric, "--json", *words)
    assert ran.returncode == 0, ran.stderr
    found: Mapping[str, object] = json.loads(ran.stdout)
    return found


@pytest.mark.one_commit_in(12)
def test_its_links_are_listed_counted_in_cuts_and_drawn(installed: Path, tmp_path: Path) -> None:
    picture = tmp_path / "hypercube.svg"
    found = topology(installed, "--draw", str(picture))
    assert found["fabric"] == "hypercube"
    links = [each for each in found["links"] if each["bytes_per_s"] == 100 * 10**9]  # type: ignore[attr-defined]
    assert sum(each["count"] for each in links) == 32
    # Each of the first eight nodes is joined to one of the others.
    assert found["bisection_bytes_per_s"] == 8 * 100 * 10**9
    assert len(set(re.findall(r">node\d+<", picture.read_text("utf-8")))) == 16


@pytest.mark.one_commit_in(9)
def test_a_run_takes_its_links_and_a_fault_names_one_of_them(installed: Path) -> None:
    file = installed / "hypercube.toml"
    cluster = ("topology=none", "node=dgx_h100", "nodes=16", f"fabric={file}")
    fault = 'fault=[{kind="link", source="node0", target="node1", factor=4}]'
    step_s: list[float] = []
    every = [f"cluster.{each}" for each in cluster]
    commands = [
        ["run", "llama2_7b", "--json", *(word for each in some for word in ("--set", each))]
        for some in (every, [*every, fault])
    ]
    for ran in answers(installed, *commands):
        assert ran.returncode == 0, ran.stderr
        step_s.append(json.loads(ran.stdout)["step_time_s"])
    assert step_s[1] > step_s[0]


@pytest.mark.one_commit_in(9)
def test_a_file_with_a_wrong_key_or_of_an_unknown_kind_is_refused(
    installed: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(FILE.replace("bits", "planes"), "utf-8")
    words = ("topology", "dgx_h100", "--nodes", "16", "--fabric")
    refused = zsim(installed, *words, str(wrong))
    assert "planes: unknown key" in refused.stderr
    refused = zsim(tmp_path, *words, str(installed / "hypercube.toml"))
    assert refused.returncode == 2
    assert "kind: 'hypercube' must be one of single_switch, fat_tree, " in refused.stderr
