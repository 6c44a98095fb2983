"""Bandwidth that offloaded states need: ZeRO-Infinity (arXiv 2104.07857), sections 4 and 6."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cli.main import answer
from zsim.cluster.files import Part
from zsim.files.installed import part_names
from zsim_plan.answer.bandwidth_result import BandwidthResult, StateBandwidth, bandwidth

V100 = 70e12
"""FLOP/s that the paper assumes for a V100."""


def state(found: BandwidthResult, name: str, path: str) -> StateBandwidth:
    (one,) = (each for each in found.states if (each.state, each.path) == (name, path))
    return one


def test_a_v100_needs_the_bandwidth_of_the_paper() -> None:
    """Section 4.2: 70 GB/s gather parameters for half the peak with one sequence of 1,024.

    1.5 TB/s to optimizer states reach 90 % with two sequences, which is 2.9 GB/s for each of 512.
    """
    found = bandwidth("dgx2", nodes=32, tokens=1024, peak_flops=V100)
    gathered = state(found, "parameters, gradients", "other GPUs")
    assert gathered.needed(0.5, V100) == pytest.approx(70e9, rel=0.03)
    found = bandwidth("dgx2", nodes=32, tokens=2048, peak_flops=V100)
    updated = state(found, "optimizer states", "drives")
    assert 512 * updated.needed(0.9, V100) == pytest.approx(1.5e12, rel=0.2)


def test_a_dgx_2_has_the_bandwidth_of_the_paper() -> None:
    """Figure 2b: 3 GB/s from host memory and 1.6 GB/s from drives for each of 16 GPUs."""
    found = bandwidth("dgx2")
    assert state(found, "checkpoints", "host memory").bytes_per_s == pytest.approx(3e9, rel=0.01)
    assert state(found, "checkpoints", "drives").bytes_per_s == pytest.approx(1.6e9, rel=0.1)


@given(
    nodes=st.sampled_from((1, 2, 8)),
    tokens=st.integers(1, 10**6),
    hidden=st.integers(1, 10**6),
    share=st.floats(0.01, 0.99),
)
def test_a_gpu_reaches_the_share_for_which_it_has_the_bandwidth(
    nodes: int, tokens: int, hidden: int, share: float
) -> None:
    found = bandwidth("dgx2", nodes=nodes, tokens=tokens, hidden=hidden)
    for each in found.states:
        reached = each.efficiency(found.peak_flops)
        assert each.bytes_per_s is not None
        assert reached is not None
        assert each.needed(reached, found.peak_flops) == pytest.approx(each.bytes_per_s)
        enough = each.bytes_per_s >= each.needed(share, found.peak_flops)
        assert enough == (reached >= share) or reached == pytest.approx(share)


def test_a_node_without_drives_has_no_bandwidth_to_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["bandwidth", "8xh100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    of_drives = [each for each in told["states"] if each["from"] == "drives"]
    assert len(of_drives) == 3
    assert {(each["bytes_per_s"], each["share_of_peak"]) for each in of_drives} == {(None, None)}
    assert told["peak_flops"] == 989.4e12


@pytest.mark.parametrize("node", part_names(Part.NODE))
def test_every_node_that_ships_has_an_answer(node: str) -> None:
    found = bandwidth(node)
    assert found.text()
    assert {each.path for each in found.states} == {"other GPUs", "host memory", "drives"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens", "0"], "--tokens: 0 must be from 1 to 1,000,000,000"),
        (["--hidden", "-1"], "--hidden: -1 must be from 1 to 1,000,000,000"),
        (["--peak", "0"], "--peak: 0 must be more than 0, at most 1e18 FLOP/s"),
        (["--peak", "nan"], "--peak: nan must be more than 0, at most 1e18 FLOP/s"),
        (["--nodes", "0"], "--nodes"),
    ],
)
def test_a_wrong_number_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["bandwidth", "dgx2", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
