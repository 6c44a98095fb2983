"""`[[fault]]`: each kind has keys of its own, is slow or dead, and names what the cluster has."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

import zsim_topologies
from zsim.cluster.cluster import Fabric, Tier
from zsim.cluster.fabric_kind import FAT_TREE
from zsim.cluster.fault import (
    DeadNic,
    DeadSwitchLink,
    DeadUplinks,
    FaultError,
    Jitter,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
    Window,
)
from zsim.scenario.fault_tables import FaultTable, NeighbourTable

FAULT: TypeAdapter[Any] = TypeAdapter(FaultTable)
TREE = Fabric(kind=FAT_TREE, tiers=(Tier(name="leaf", nodes_below=4),))
CLUSTER = replace(zsim_topologies.load("dgx_a100_infiniband", nodes=64), fabric=TREE)
WHERE = {
    "switch_link": ({"rank": 3}, SlowSwitchLink, DeadSwitchLink),
    "nic": ({"node": 1, "nic": 2}, SlowNic, DeadNic),
    "leaf": ({"group": 1, "rail": 0}, SlowUplinks, DeadUplinks),
}
TIER = {"leaf": {"tier": 0}}


@given(st.sampled_from(sorted(WHERE)), st.fractions(1, 100), st.booleans(), st.integers(0, 9))
def test_a_link_is_slow_by_a_factor_or_dead(
    kind: str, factor: object, dead: bool, start_ps: int
) -> None:
    keys, slow_kind, dead_kind = WHERE[kind]
    how = {"dead": True} if dead else {"factor": str(factor)}
    window = Window(start_ps=start_ps * 10**12, end_ps=(start_ps + 1) * 10**12)
    times = {"start": f"{start_ps} s" if start_ps else 0, "end": f"{start_ps + 1} s"}
    found = FAULT.validate_python({"kind": kind, **keys, **how, **times}).on(CLUSTER)
    expected: dict[str, Any] = {**keys, **TIER.get(kind, {}), "window": window}
    if not dead:
        expected["factor"] = factor
    assert found == (dead_kind if dead else slow_kind)(**expected)


def test_a_gpu_is_slow_and_kernels_jitter() -> None:
    gpu = FAULT.validate_python({"kind": "gpu", "rank": 3, "factor": "3/2"})
    assert gpu.on(CLUSTER) == SlowGpu(rank=3, factor=gpu.factor)
    jitter = FAULT.validate_python({"kind": "jitter", "deviation": 0.1})
    assert jitter.on(CLUSTER) == Jitter(deviation=0.1)


def test_a_tier_that_the_fabric_does_not_have_is_named() -> None:
    fault = FAULT.validate_python({"kind": "spine", "group": 0, "dead": True})
    with pytest.raises(FaultError, match=r"^kind: 'spine' has no uplinks here; with some: leaf$"):
        fault.on(CLUSTER)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"kind": "nic", "node": 0, "nic": 0}, "missing; give it, or dead"),
        (
            {"kind": "nic", "node": 0, "nic": 0, "dead": True, "factor": 2},
            "'2' stands beside dead = true",
        ),
        ({"kind": "gpu", "rank": 0, "factor": 2, "dead": True}, "Extra inputs"),
        ({"kind": "jitter", "deviation": 0.1, "start": "2 s", "end": "1 s"}, "must be later"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(table: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        FAULT.validate_python(table)


def test_a_neighbour_has_two_nodes_or_more() -> None:
    given = {"bandwidth_per_direction": "1 GB/s"}
    assert NeighbourTable.of({"nodes": (1, 2), **given}).neighbour().first_node == 1
    with pytest.raises(ValueError, match=r"^nodes: 2 to 2 must be two or more, ascending$"):
        NeighbourTable.of({"nodes": (2, 2), **given})
