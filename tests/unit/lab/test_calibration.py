"""Calibration: constants that are known are found again; tables are read or refused in one line."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from zsim.cluster.profile.files import Profiles, parse, text
from zsim.cluster.profile.network import NetworkProfile, ProfileError
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.algorithm.installed_algorithms import check
from zsim.network.band import slowed
from zsim.network.tuner import alone_s
from zsim_lab.fit.constants import EXCEPTIONS, START
from zsim_lab.fit.network_fit import fitted
from zsim_lab.fit.network_profiles import calibrated
from zsim_lab.fit.predictor import Point, Predictor
from zsim_lab.rows.collective_rows import read, stated_fabric
from zsim_lab.rows.csv_rows import MeasuredError
from zsim_lab.rows.hardware import gpu_in, system_in
from zsim_lab.rows.link_rows import read_links, scaled
from zsim_lab.verdict.network_verdict import judged, verdict

TRUTH = START.changed(
    launch_s=2e-5, base_s=9e-6, simple_hop_s=2e-6, link=0.8, direct=0.75, nvls=0.66, add=1.5
)
H100 = Bandwidths(gpu=450 * 10**9, node=400 * 10**9, pair=50 * 10**9)
WORDS = {Collective.ALL_TO_ALL: "alltoall", Collective.SEND_RECEIVE: "sendrecv"}


def sweep(
    collective: Collective, ranks: int, size: int, truth: NetworkProfile = TRUTH, **changes: str
) -> dict[str, str]:
    """A row as nccl-tests would print it on hardware with the constants `truth`."""
    shape = GroupShape(ranks=ranks, nodes=-(-ranks // 8))
    seconds = alone_s(truth, collective, size, shape, links=H100)
    row = {
        "dataset": "drawn",
        "cluster": "a cluster",
        "gpu": "NVIDIA H100 80GB HBM3",
        "n_nodes": str(shape.nodes),
        "n_ranks": str(ranks),
        "nic": "",
        "collective": WORDS.get(collective, str(collective)),
        "size_bytes": str(size),
        "oop_time_us": repr(seconds * 1e6),
        "ip_time_us": "",
        "source": "github:someone/something/logs/one.log@abc123",
    }
    return row | changes


def sweeps(*ranks: int) -> list[dict[str, str]]:
    kinds = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    return [
        sweep(kind, each, 2**power)
        for each in ranks
        for kind in (*kinds, Collective.ALL_TO_ALL)
        for power in range(16, 33, 2)
    ]


@pytest.mark.one_commit_in(6)
def test_the_fit_finds_constants_that_predict_groups_that_it_has_not_seen() -> None:
    rows, left = read("nccl_tests_sweeps", sweeps(2, 8))
    assert not left
    found = fitted(rows, START).shared
    for shape in (GroupShape(ranks=4), GroupShape(ranks=6)):
        for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER):
            for size in (2**18, 2**22, 2**26, 2**30):
                predicted, true = (
                    alone_s(each, collective, size, shape, links=H100) for each in (found, TRUTH)
                )
                assert predicted == pytest.approx(true, rel=0.06)


def test_many_at_once_are_predicted_as_one_by_one() -> None:
    all_points = [
        Point(
            collective=collective,
            shape=GroupShape(ranks=ranks, nodes=-(-ranks // 8)),
            size_bytes=size,
            links=H100,
            seconds=1.0,
        )
        for collective in Collective
        for ranks in (2, 4, 5, 8, 16, 24)
        for size in (2**10, 2**20, 2**30)
    ]
    for profile in (TRUTH, TRUTH.changed(nvls=0.0)):
        one_by_one = [
            alone_s(profile, each.collective, each.size_bytes, each.shape, links=H100)
            for each in all_points
        ]
        assert np.allclose(Predictor(all_points).seconds(profile), one_by_one, rtol=1e-5)


@pytest.mark.one_commit_in(18)
def test_what_two_systems_share_is_found_from_both_and_an_exception_is_named() -> None:
    slow = TRUTH.changed(launch_s=9e-5, add=0.9)
    rows = [row | {"dataset": "quick"} for row in sweeps(2, 8)]
    for kind in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        rows += [sweep(kind, 2, 2**power, slow, dataset="slow") for power in range(16, 33, 2)]
    measured, _ = read("nccl_tests_sweeps", rows)
    found = fitted(measured, START)
    quick, other = found.systems["quick"], found.systems["slow"]
    differs = {name for name in START.numbers if quick[name] != other[name]}
    assert differs <= EXCEPTIONS
    assert "launch_s" in differs
    assert other["launch_s"] == pytest.approx(9e-5, rel=0.1)
    # 8 ranks were never measured on the slow system.
    shape = GroupShape(ranks=8)
    for size in (2**24, 2**30):
        predicted, true = (
            alone_s(each, Collective.REDUCE_SCATTER, size, shape, links=H100)
            for each in (other, slow)
        )
        assert predicted == pytest.approx(true, rel=0.06)


@pytest.mark.one_commit_in(9)
def test_the_same_rows_give_the_same_constants() -> None:
    measured, _ = read("nccl_tests_sweeps", sweeps(4))
    assert fitted(measured, START) == fitted(measured, START)


LINKS = {
    "topology": "DGX2_1MB",
    "gpus_per_node": "16",
    "nics_per_node": "8",
    "intra_alpha": "0.5",
    "intra_beta_list": "[8, 16]",
    "inter_alpha": "2.5",
    "inter_beta": "100",
    "source": "a paper",
}


def test_a_gpu_of_which_only_links_were_timed_is_scaled_from_another() -> None:
    nearest = Profiles(gpu="a100", shared=TRUTH, systems={}, publications=("b",), errors={})
    small = LINKS | {"topology": "DGX2_1KB", "intra_beta_list": "[1]"}
    other = LINKS | {"topology": "NDv2_1MB", "gpus_per_node": "8", "intra_beta_list": "[1]"}
    links = read_links("link_alpha_beta_v100", [small, LINKS, other])
    found = scaled("v100", links, nearest)
    assert found is not None
    assert (found.scaled_from, found.publications) == ("a100", ("a paper", "b"))
    # 1 MiB in 8 us of a link of 150 GB/s, in 100 us of a NIC of 12.5 GB/s.
    assert found.shared["link"] == pytest.approx(2**20 / 8e-6 / 150e9)
    assert found.shared["nic"] == pytest.approx(2**20 / 100e-6 / 12.5e9)
    assert found.shared["far_hop_s"] == pytest.approx(2e-6)
    changed = {name for name in START.numbers if found.shared[name] != TRUTH[name]}
    assert changed == {"link", "nic", "far_hop_s", "nvls"}
    assert parse("v100", tomllib.loads(text(found)), check).scaled_from == "a100"
    assert scaled("v100", links[2:], nearest) is None


def test_a_gpu_without_published_collectives_has_the_constants_of_its_sibling() -> None:
    rack = [row | {"gpu": "GB200 NVL72"} for row in sweeps(4)]
    rows, _ = read("nccl_tests_sweeps", rack)
    one, other = calibrated(rows, report=lambda _: None, holds_out=False)
    assert (one.gpu, other.gpu, other.scaled_from) == ("gb200", "gb300", "gb200")
    assert other.shared.numbers == one.shared.numbers
    assert other.publications == ()
    assert parse("gb300", tomllib.loads(text(other)), check).shared.name == "gb300"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intra_beta_list": "[0]"}, "line 2: a chunk takes no time"),
        ({"inter_alpha": "fast"}, "line 2: inter_alpha 'fast' is not a number"),
        ({"topology": "DGX2"}, "line 2: "),
    ],
)
def test_a_table_of_links_that_is_none_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(MeasuredError, match=f"link_alpha_beta_v100: {message}"):
        read_links("link_alpha_beta_v100", [LINKS | change])
    with pytest.raises(MeasuredError, match="no column 'inter_beta'"):
        read_links("x", [{key: LINKS[key] for key in LINKS if key != "inter_beta"}])


def profiles_of(rows: Sequence[dict[str, str]]) -> Profiles:
    found, _ = read("nccl_tests_sweeps", rows)
    (profiles,) = calibrated(found, report=lambda _: None)
    return profiles


def test_calibration_says_what_it_was_fitted_to_and_how_far_it_carries() -> None:
    rows = [sweep(Collective.ALL_GATHER, ranks, 2**26) for ranks in (2, 8)]
    profiles = profiles_of(rows)
    assert profiles.gpu == "h100"
    assert set(profiles.systems) == {"drawn"}
    assert profiles.publications == ("github:someone/something@abc123",)
    assert profiles.errors["fitted_large"] < 0.01
    assert profiles.errors["held_out_large"] > profiles.errors["fitted_large"]


def test_what_one_nic_carries_is_taken_from_a_note() -> None:
    note = "not stated (per-NIC busbw 49 GB/s implies 400 Gb/s)"
    found, _ = read("nccl_tests_sweeps", [sweep(Collective.ALL_GATHER, 8, 2**28, nic=note)])
    large = stated_fabric(found[0])
    assert large is not None
    assert (large.shape, large.links.node) == (GroupShape(ranks=2, nodes=2), 50 * 10**9)
    assert large.seconds == pytest.approx(large.size_bytes / 2 / 49e9)
    plain, _ = read("nccl_tests_sweeps", [sweep(Collective.ALL_GATHER, 8, 2**28)])
    assert stated_fabric(plain[0]) is None


def test_held_out_together_is_what_file_hardware_collective_and_group_have_in_common() -> None:
    rows = [sweep(Collective.ALL_GATHER, 8, 2**28, dataset=each) for each in ("one", "other")]
    rows += [sweep(Collective.ALL_GATHER, 4, 2**28), sweep(Collective.REDUCE_SCATTER, 8, 2**28)]
    found, _ = read("nccl_tests_sweeps", rows)
    assert len({row.system for row in found}) == 3
    assert len({row.group for row in found}) == 3


def test_half_the_ranks_of_a_node_reach_half_of_its_nics() -> None:
    whole, half = (
        read("nccl_tests_sweeps", [sweep(Collective.ALL_GATHER, 16, 2**28, n_nodes=nodes)])[0][0]
        for nodes in ("2", "4")
    )
    assert (whole.links.node, half.links.node) == (400 * 10**9, 200 * 10**9)


def test_a_profile_survives_its_file() -> None:
    profiles = Profiles(
        gpu="h100",
        shared=replace(START, name="h100"),
        systems={
            "one": replace(TRUTH, name="h100/one"),
            'two "quoted"': replace(START, name='h100/two "quoted"'),
        },
        publications=('a "b" \\ c',),
        errors={"fitted_large": 0.0123},
    )
    assert parse("h100", tomllib.loads(text(profiles)), check) == profiles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": 3}, "x: gpu must be a name and publications a list"),
        ({"colour": 1}, "x: colour is not a key of a profile"),
        ({"constants": {}}, "x: constants: launch_s is missing"),
        ({"systems": {"one": {"mass": 1.0}}}, "x: one: mass is not a constant"),
        ({"systems": {"one": {"link": 2.0}}}, "x: one: link: 2.0 must be at most 1, it is a share"),
        ({"systems": {"one": {"link": "2"}}}, "x: one: link must be a number"),
        ({"systems": 1}, "x: systems must be a table"),
        ({"errors": 1}, "x: errors must be a table of numbers"),
        ({"scaled_from": 1}, "x: scaled_from must be the name of a GPU"),
    ],
)
def test_a_profile_that_is_none_is_refused_in_one_line(
    change: dict[str, object], message: str
) -> None:
    table = tomllib.loads(text(Profiles(gpu="h100", shared=START, systems={}, errors={})))
    with pytest.raises(ProfileError) as caught:
        parse("x", table | change, check)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"collective": "gather"}, "collective 'gather' is not modelled"),
        ({"size_bytes": "1.5"}, "size_bytes '1.5' is not a whole number"),
        ({"size_bytes": ""}, "size_bytes '' is not a whole number"),
        ({"oop_time_us": "0"}, "oop_time_us '0' is not more than 0"),
        ({"n_nodes": "9"}, "8 ranks on 9 nodes"),
        ({"gpu": "L40S"}, "gpu 'L40S' is not known"),
        ({"oop_time_us": "1"}, "234881 GB/s on a link of 450 GB/s: its size is not S"),
    ],
)
def test_a_row_that_is_not_modelled_is_named_with_the_reason(
    changes: dict[str, str], reason: str
) -> None:
    row = sweep(Collective.ALL_GATHER, 8, 2**28) | changes
    found, left = read("nccl_tests_sweeps", [row])
    assert not found
    assert [(each.row, each.reason) for each in left] == [(2, reason)]


def test_a_table_without_a_column_and_an_unknown_table_are_refused() -> None:
    row = {key: value for key, value in sweep(Collective.ALL_GATHER, 8, 1).items() if key != "gpu"}
    with pytest.raises(MeasuredError, match="nccl_tests_sweeps: no column 'gpu'"):
        read("nccl_tests_sweeps", [row])
    with pytest.raises(MeasuredError, match=r"weather: not one of nccl_tests_sweeps, .*"):
        read("weather", [])


def test_a_verdict_counts_every_row_and_says_which_share_is_inside_the_band() -> None:
    profiles = {"h100": Profiles(gpu="h100", shared=TRUTH, systems={}, errors={})}
    found, left = read("nccl_tests_sweeps", [*sweeps(8), sweep(Collective.REDUCE, 8, 2) | {
        "gpu": "V100"}, sweep(Collective.REDUCE, 8, 2) | {"collective": "scan"}])  # fmt: skip
    said = verdict("nccl_tests_sweeps", found, left, profiles)
    assert said.total == 38
    assert said.all is not None
    assert said.all.rows == 36
    assert said.all.p90 < 1e-4
    assert sorted(reason for _, reason in said.unmodelled) == [
        "collective 'scan' is not modelled",
        "no profile of v100",
    ]
    shape = GroupShape(ranks=32, nodes=4)
    seconds = alone_s(TRUTH, Collective.ALL_GATHER, 2**28, shape, links=H100)
    busbw = 2**28 * 31 / 32 / seconds / 1e9
    row = {
        "gpu": "H100 80GB",
        "n_nodes": "4",
        "n_ranks": "32",
        "collective": "all_gather",
        "size": "256MB (per plot)",
        "bandwidth_GBps": str(busbw),
        "source": "a plot",
    }
    rows = [row | {"p5_GBps": str(busbw * low), "p95_GBps": str(busbw * 1.2)} for low in (0.9, 1.1)]
    banded, _ = read("collective_bandwidth_h100_scaling", rows)
    inside, _ = verdict("collective_bandwidth_h100_scaling", banded, [], profiles).facts
    assert (inside.name, inside.value) == ("inside_published_band", 0.5)
    assert max(each.error for each in judged(profiles["h100"], banded)) < 1e-4


def test_a_published_band_is_covered_by_the_fastest_and_the_slowest_that_its_fabric_may_be() -> (
    None
):
    named = TRUTH.changed(congestion=0.3, tail=2.0)
    systems = {"ultrascale_playbook": named}
    profiles = Profiles(
        gpu="h100", shared=TRUTH, systems=systems, errors={}, fabrics=("ultrascale_playbook",)
    )
    shape = GroupShape(ranks=128, nodes=16)
    alone, slow = (
        alone_s(each, Collective.ALL_GATHER, 2**28, shape, links=H100)
        for each in (named.changed(congestion=0.0), slowed(named, 2.0))
    )
    row = {
        "gpu": "H100 80GB",
        "n_nodes": "16",
        "n_ranks": "128",
        "collective": "all_gather",
        "size": "256MB (per plot)",
        "bandwidth_GBps": "50",
        "source": "a plot",
    }

    def between(least_s: float, most_s: float) -> dict[str, str]:
        p5, p95 = (2**28 * 127 / 128 / seconds / 1e9 for seconds in (most_s, least_s))
        return row | {"p5_GBps": repr(p5), "p95_GBps": repr(p95)}

    rows = [
        between(alone * 1.01, slow * 0.99),
        between(alone * 0.99, slow * 0.99),
        between(alone * 1.01, slow * 1.01),
    ]
    banded, _ = read("collective_bandwidth_h100_scaling", rows)
    said = verdict("collective_bandwidth_h100_scaling", banded, [], {"h100": profiles})
    assert said.facts[-1].value == {"published": 3, "covered": 1}


@pytest.mark.parametrize(
    ("words", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("GB200 NVL72", "gb200"),
        ("8x B200 node", "b200"),
        ("H20", "h20"),
        ("H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("not stated", "unnamed"),
    ],
)
def test_the_gpu_is_read_from_free_text(words: str, gpu: str) -> None:
    assert gpu_in(words) == gpu


def test_clouds_are_known_by_their_instances_and_others_by_their_name() -> None:
    assert system_in("AWS 2x p4de.24xlarge", "readme", "a100") == ("aws_p4", 50 * 10**9)
    assert system_in("AWS p5.48xlarge (EKS)", "readme", "h100") == ("aws_p5_eks", 400 * 10**9)
    assert system_in("some cluster", "Our Tests (2 nodes)", "h100") == ("our_tests", 400 * 10**9)
