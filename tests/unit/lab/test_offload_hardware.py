"""Constants of CPUs and drives are those that fit published rows, and wrong rows are refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

import zsim_scenarios
from zsim.files.installed import topology
from zsim_lab.answer.paper_validation import verdicts_of
from zsim_lab.rows.host_figures import fitted
from zsim_lab.verdict.paper_figures import parse


def fitted_values(figure: str, *words: str) -> list[tuple[Mapping[str, object], float]]:
    """Return keys and published values of the rows of `figure` that constants are fitted to."""
    paper = parse(zsim_scenarios.published_text("offload_hardware"))
    (found,) = (each for each in paper.figures if each.name == figure)
    rows = [run for run in found.runs if run.fitted and all(word in run.label for word in words)]
    return [(run.alternatives[0], run.published) for run in rows if run.published is not None]


@pytest.mark.parametrize(
    ("node", "label", "kernel", "each_bytes", "sockets"),
    [
        ("dgx2", "DGX-2, ", "adam", 28, 2),
        ("gb200_nvl72", "Grace", "adam", 28, 1),
        ("dgx2", "unscale", "unscale", 8, 2),
    ],
)
def test_shares_of_kernels_on_cpus_are_those_that_fit_the_rows(
    node: str, label: str, kernel: str, each_bytes: int, sockets: int
) -> None:
    rows = [row for row in fitted_values("Adam on CPUs", label) if row[0]["kernel"] == kernel]
    host = topology(node, "single_switch", 1).host
    assert host is not None
    assert host.cpu is not None
    memory = host.memory_bytes_per_s * sockets / host.cpu.sockets
    share = fitted(each_bytes * cast("int", row["elements"]) / seconds for row, seconds in rows)
    found = host.cpu.adam_share if kernel == "adam" else host.cpu.elementwise_share
    assert float(found) == pytest.approx(share / memory, abs=5e-4)


def test_the_latency_of_drives_is_the_one_that_fits_the_rows() -> None:
    rows = fitted_values("drives of a DGX-2, by size and threads")
    drives = topology("dgx2", "single_switch", 1).drives
    assert drives is not None
    assert drives.read_bytes_per_s is not None
    transfer_s = 4096 / drives.read_bytes_per_s
    latency = fitted(
        cast("int", row["threads"]) * 4096 / (rate * 1e9) - transfer_s for row, rate in rows
    )
    assert drives.latency_ps / 1e6 == pytest.approx(latency * 1e6, abs=0.5)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_rates_of_a_cloud_s_drives_are_those_that_fit_the_rows(direction: str) -> None:
    rows = fitted_values("drives of Azure NC96ads A100 v4", direction)
    (stated,) = {str(row[direction]) for row, _ in rows}
    rate = fitted(value / cast("int", row["drives"]) for row, value in rows)
    assert stated == f"{rate:.2f} GB/s"


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"adam", 2000000000', '"lamb", 2000000000', "kernel: 'lamb' must be one of adam"),
        ('["dgx2", "adam", 2000000000', '["dgx3", "adam", 2000000000', "dgx3"),
        ("2000000000, 0]", '"many", 0]', "elements: 'many' must be a whole number"),
    ],
)
def test_a_row_of_hardware_that_cannot_be_is_told_in_a_line(old: str, new: str, why: str) -> None:
    text = zsim_scenarios.published_text("offload_hardware").replace(old, new, 1)
    paper = parse(text)
    figures = tuple(each for each in paper.figures if each.name == "Adam on CPUs")
    (found,) = verdicts_of(replace(paper, figures=figures))
    ((label, reason),) = found.unmodelled
    assert label == "DGX-2, 2 billion"
    assert why in reason
    assert "\n" not in reason
