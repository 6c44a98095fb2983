"""Systems that ship: every number has a source, and a wrong file is one line."""

import copy
import tomllib
from typing import Any

import pytest

import zsim_topologies
from zsim.cluster import ClusterError
from zsim.dtype import DType
from zsim.topology import TopologyError, UnknownTopologyError, cluster_of


@pytest.mark.parametrize("name", zsim_topologies.names())
def test_every_system_loads_and_cites_every_table(name: str) -> None:
    cluster = zsim_topologies.load(name, nodes=3)
    assert (cluster.name, cluster.nodes) == (name, 3)
    cited = dict(cluster.cites)
    wanted = {"node", "gpu", "switch", "nic", "switch.latency", "nic.latency"}
    for rate in cluster.gpu.rates:
        path = f"gpu.rates.{rate.dtype}"
        wanted |= {path, f"{path}.matmul", f"{path}.elementwise"}
        assert 0 < rate.matmul <= rate.peak
        assert rate.elementwise <= rate.peak
    assert wanted <= set(cited)
    assert all(cited.values())


def test_the_zero_paper_s_cluster_is_what_the_paper_says() -> None:
    # Rajbhandari et al. 2020, section 10.1: 25 DGX-2, 400 V100 32 GB, 800 Gb/s between nodes.
    cluster = zsim_topologies.load("dgx2_infiniband", nodes=25)
    assert cluster.ranks == 400
    assert cluster.gpu.memory_bytes == 32 * 10**9
    assert cluster.nics_per_node * cluster.nic_link.bytes_per_s * 8 == 800 * 10**9
    assert cluster.switch_link.bytes_per_s == 150 * 10**9
    assert cluster.gpu.rate(DType.FP16).peak == 125 * 10**12


def test_an_unknown_system_lists_those_that_exist() -> None:
    with pytest.raises(UnknownTopologyError) as caught:
        zsim_topologies.load("dgx3")
    assert str(caught.value) == (
        "'dgx3' must be one of dgx2_infiniband, dgx_a100_infiniband, dgx_h100_infiniband"
    )


def test_a_cluster_needs_a_node() -> None:
    with pytest.raises(ClusterError, match="nodes: 0 must be at least 1"):
        zsim_topologies.load("dgx2_infiniband", nodes=0)


WRONG: dict[str, tuple[str, object, str]] = {
    "unknown key": ("nic.speed", "1 GB/s", "wrong: nic.speed: unknown key"),
    "bits": (
        "nic.bandwidth_per_direction",
        "100 Gb/s",
        "wrong: nic.bandwidth_per_direction: '100 Gb/s' is not a quantity such as '450 GB/s'; "
        "bits are not accepted, write bytes",
    ),
    "a bare number": (
        "gpu.memory",
        32,
        "wrong: gpu.memory: 32 is not a quantity with its unit, in quotes",
    ),
    "no GPUs": ("node.gpus", 0, "wrong: node.gpus: Input should be greater than or equal to 1"),
    "no source": ("switch.source", None, "wrong: switch.source: missing"),
    "a format that does not exist": (
        "gpu.rates.fp17",
        {},
        "wrong: gpu.rates.fp17.[key]: Input should be 'int8', 'fp16', 'bf16', 'fp32', 'fp64' "
        "or 'int64'",
    ),
}


@pytest.mark.parametrize(("path", "value", "expected"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_one_line_with_the_key(path: str, value: object, expected: str) -> None:
    table = copy.deepcopy(tomllib.loads(zsim_topologies.text("dgx2_infiniband")))
    *tables, key = path.split(".")
    inner: dict[str, Any] = table
    for part in tables:
        inner = inner[part]
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    with pytest.raises(TopologyError) as caught:
        cluster_of("wrong", table, 1)
    assert str(caught.value) == expected
