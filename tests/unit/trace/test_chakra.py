"""Chakra execution traces: by the schema, out of runs, and back as schedules."""

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.launch import run
from zsim.api.placement import on_cluster
from zsim.api.run_result import RunResult
from zsim.api.scenario import load
from zsim.backend.chakra_document import document_of
from zsim.backend.document import DocumentError, encode
from zsim.schedule.mesh import Axis, Group, Mesh
from zsim.trace.chakra import ChakraTrace
from zsim.trace.chakra_schema import (
    ChakraError,
    ChakraNode,
    CommKind,
    NodeKind,
    Value,
    metadata_bytes,
    node_bytes,
    read_nodes,
)

BY_PROTOC = bytes.fromhex(
    "070a05312e302e30700807120667617468657218072201032a0303ac0238d209520e0a0969735f6370755f6f70d801"
    "00520d0a09636f6d6d5f74797065480252120a09636f6d6d5f73697a6548808080808020520d0a0770675f6e616d65"
    "ea01013252150a0c696e766f6c7665645f64696de201040a020100980108081209616c6c2074797065731804300542"
    "0d0a035b315d12025b5d1a025b5d520f0a016412017819000000000000f83f52080a01662d000000bf520e0a016938"
    "fdffffffffffffffff0152050a0175580452060a017388010952090a01789d0106000000520d0a0179c901f9ffffff"
    "ffffffff52080a0162fa01020001520a0a016c8201040a020104520c0a0174f201060a01610a0162"
)
"""Two nodes as classes that protoc made of Chakra 1.0.0's et_def.proto, and Chakra's own
`protolib.encodeMessage`, wrote them: a gather, and a node with attributes of many types."""


def test_what_chakras_own_tools_wrote_is_read() -> None:
    gather, other = read_nodes(BY_PROTOC)
    assert gather == ChakraNode(
        number=7,
        name="gather",
        kind=NodeKind.COMM_COLL,
        data_deps=(3, 300),
        ctrl_deps=(3,),
        duration_us=1234,
        attributes={
            "is_cpu_op": False,
            "comm_type": CommKind.ALL_GATHER,
            "comm_size": 2**40,
            "pg_name": "2",
            "involved_dim": [True, False],
        },
    )
    assert other.kind is NodeKind.COMP
    assert other.attributes == {
        "d": 1.5,
        "f": -0.5,
        "i": -3,
        "u": 4,
        "s": -5,
        "x": 6,
        "y": -7,
        "b": b"\0\1",
        "l": [-1, 2],
        "t": ["a", "b"],
    }


def test_a_node_is_written_as_chakras_own_tools_write_it() -> None:
    first, *_ = read_nodes(BY_PROTOC)
    plain = {name: value for name, value in first.attributes.items() if name != "involved_dim"}
    mine = ChakraNode(
        number=first.number,
        name=first.name,
        kind=first.kind,
        data_deps=first.data_deps,
        ctrl_deps=first.ctrl_deps,
        duration_us=first.duration_us,
        attributes=plain,
    )
    own = node_bytes(mine)
    body = BY_PROTOC[8 : 8 + 1 + 112]  # behind the metadata, a length and so many bytes
    listed = bytes.fromhex("52150a0c696e766f6c7665645f64696de201040a020100")
    assert metadata_bytes() == BY_PROTOC[:8]
    assert own[1:] == body[1:].replace(listed, b"")


def node(
    number: int,
    kind: NodeKind = NodeKind.COMP,
    *deps: int,
    us: int = 0,
    **attributes: Value,
) -> ChakraNode:
    return ChakraNode(
        number=number,
        name=f"n{number}",
        kind=kind,
        data_deps=deps,
        duration_us=us,
        attributes=attributes,
    )


@given(st.binary(max_size=300), st.integers(0, len(BY_PROTOC)))
def test_bytes_that_are_no_trace_are_refused_in_one_line(noise: bytes, at: int) -> None:
    said = ""
    try:
        for each in read_nodes(BY_PROTOC[:at] + noise):
            assert each.kind in NodeKind
    except ChakraError as error:
        said = str(error)
    assert "\n" not in said


TABLES: dict[str, object] = {
    "title": "a run",
    "model": {
        "layers": 3,
        "hidden_size": 1024,
        "attention_heads": 16,
        "sequence_length": 1024,
        "vocab_size": 8192,
    },
    "cluster": {"topology": "dgx_h100_infiniband", "nodes": 2},
    "zero": {"stage": 3},
    "train": {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "precision": "bf16"},
    "compute": {"profile": "h100"},
    "network": {"profile": "h100"},
}
NANOTRON = {"zero.emulate": "nanotron", "zero.stage": 1, "parallel.pipeline": 3}
RUNS: Mapping[str, Mapping[str, object]] = {
    "zsim": {},
    "hybrid": {"zero.emulate": "fsdp2", "parallel.data": 8, "parallel.replicate": 2},
    "tensor": {"zero.emulate": "fsdp2", "parallel.tensor": 4},
    "deepspeed": {"zero.emulate": "deepspeed", "zero.stage": 2},
    "offload": {"offload.optimizer": "host"},
    "clipped": {"zero.stage": 2, "train.precision": "fp16", "train.clip_norm": 1.0},
    "pipeline": {**NANOTRON, "parallel.tensor": 2, "parallel.data": 2, "cluster.nodes": None},
}
TOLERANCE = 0.003
"""Durations are whole microseconds, and the first step has no step before it."""


@cache
def ran(name: str) -> RunResult:
    return run(load(TABLES, RUNS[name]), check=False)


@cache
def traced(name: str) -> ChakraTrace:
    found = ran(name)
    return ChakraTrace(found.job.schedule, found.recorded)


def groups_of(trace: ChakraTrace) -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads(trace.groups_json())
    return found


def back(name: str) -> RunResult:
    trace = traced(name)
    ranks = [list(read_nodes(trace.rank_bytes(rank))) for rank in trace.ranks]
    return simulated(encode(document_of("back", ranks, groups_of(trace))), name)


def simulated(text: str, name: str) -> RunResult:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.json"
        path.write_text(text, "utf-8")
        placed = on_cluster(load(path), ran(name).job.cluster, "test")
        return run(placed, check=False)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", RUNS)
def test_a_trace_that_is_read_back_takes_the_same_time(name: str) -> None:
    assert back(name).step_time_s == pytest.approx(ran(name).step_time_s, rel=TOLERANCE)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", RUNS)
def test_nodes_wait_for_earlier_ones_and_all_of_a_step_are_there(name: str) -> None:
    trace, schedule = traced(name), ran(name).job.schedule
    recorded = {rank.rank: rank for rank in ran(name).recorded.ranks}
    for rank in list(trace.ranks)[:3]:
        nodes = list(trace.rank_nodes(rank))
        assert [each.number for each in nodes] == list(range(len(nodes)))
        assert all(dep < each.number for each in nodes for dep in each.data_deps)
        assert all(set(each.ctrl_deps) <= set(each.data_deps) for each in nodes)
        if rank in recorded:
            last = ran(name).recorded.steps - 1
            ran_here = {each.operation for each in recorded[rank].events if each.step == last}
            assert {each.name for each in nodes} - {"host"} == ran_here
    assert list(trace.ranks) == list(range(schedule.mesh.size))


LAPS = {
    CommKind.ALL_GATHER: lambda size, ranks: size * (ranks - 1),
    CommKind.REDUCE_SCATTER: lambda size, ranks: size * (ranks - 1) // ranks,
    CommKind.ALL_REDUCE: lambda size, ranks: 2 * size * (ranks - 1) // ranks,
}
"""Bytes that a rank of a ring sends, by what it brings."""


@pytest.mark.parametrize("name", [name for name in RUNS if name != "pipeline"])
def test_collectives_carry_the_bytes_that_the_simulation_sent(name: str) -> None:
    trace, recorded = traced(name), ran(name).recorded
    groups = groups_of(trace)
    carried = 0
    for each in trace.rank_nodes(0):
        if each.kind is NodeKind.COMM_COLL:
            size, group = each.attributes["comm_size"], each.attributes["pg_name"]
            kind = each.attributes["comm_type"]
            assert isinstance(group, str)
            assert isinstance(kind, int)
            assert 0 in groups[group]
            carried += LAPS[CommKind(kind)](size, len(groups[group]))
    last = recorded.steps - 1
    sent = sum(each.bytes for each in recorded.ranks[0].transfers if each.step == last)
    assert carried == pytest.approx(sent, rel=1e-3)


def test_every_send_has_its_receive() -> None:
    trace = traced("pipeline")
    ends: dict[NodeKind, Counter[tuple[object, ...]]] = {
        NodeKind.COMM_SEND: Counter(),
        NodeKind.COMM_RECV: Counter(),
    }
    for rank in trace.ranks:
        for each in trace.rank_nodes(rank):
            if each.kind in ends:
                own = "comm_src" if each.kind is NodeKind.COMM_SEND else "comm_dst"
                assert each.attributes[own] == rank
                names = ("comm_src", "comm_dst", "comm_tag", "comm_size")
                ends[each.kind][tuple(each.attributes[name] for name in names)] += 1
    assert ends[NodeKind.COMM_SEND] == ends[NodeKind.COMM_RECV]
    assert ends[NodeKind.COMM_SEND].total() > 10
    assert set(ends[NodeKind.COMM_SEND].values()) == {1}


def test_copies_to_the_host_are_nodes_of_memory() -> None:
    kinds = Counter(each.kind for each in traced("offload").rank_nodes(0))
    assert kinds[NodeKind.MEM_LOAD] > 0
    assert kinds[NodeKind.MEM_STORE] > 0


@pytest.mark.one_commit_in(6)
def test_a_longer_node_makes_a_longer_step() -> None:
    trace = traced("zsim")
    nodes = list(trace.rank_nodes(0))
    longest = max(nodes, key=lambda each: each.duration_us * (each.kind is NodeKind.COMP))
    more = [
        each if each is not longest else node(each.number, each.kind, *each.data_deps, us=9000)
        for each in nodes
    ]
    ranks = [more, *([nodes] * (len(trace.ranks) - 1))]
    found = simulated(encode(document_of("longer", ranks, groups_of(trace))), "zsim")
    assert found.step_time_s > back("zsim").step_time_s + 0.008


def test_a_trace_without_durations_takes_the_time_of_the_roofline() -> None:
    flops = 10**13
    ranks = [[node(0, num_ops=flops, tensor_size=10**6), node(1, NodeKind.COMP, 0, num_ops=flops)]]
    document = document_of("roofline", ranks * 2, {})
    kernels = [each.kernels for each in document.schedule.programs[0].step]  # type: ignore[union-attr]
    assert [[kernel.flops for kernel in each] for each in kernels] == [[flops], [flops]]
    assert document.schedule.programs[0].step[1].after  # type: ignore[union-attr]


def test_nodes_that_take_no_time_pass_on_what_they_wait_for() -> None:
    nodes = [
        node(0, us=5, stream="a"),
        node(1, NodeKind.METADATA, 0),
        node(2, NodeKind.COMP, 1),
        node(3, NodeKind.COMP, 2, us=5, stream="b"),
    ]
    first, second = document_of("passed on", [nodes], {}).schedule.programs[0].step
    assert second.after == (first.id,)  # type: ignore[union-attr]


SHAPES = st.lists(st.integers(2, 3), min_size=1, max_size=4)


@pytest.mark.one_commit_in(6)
@settings(deadline=None, max_examples=30)
@given(SHAPES, st.data())
def test_groups_along_axes_of_a_grid_are_groups_of_the_schedule(
    sizes: list[int], data: st.DataObject
) -> None:
    mesh = Mesh(axes=tuple(Axis(name=f"m{n}", size=size) for n, size in enumerate(sizes)))
    names = [axis.name for axis in mesh.axes]
    chosen = data.draw(st.lists(st.sets(st.sampled_from(names), min_size=1), max_size=3))
    lines = {axis: Group(name=axis, axes=(axis,)) for axis in names}  # they say where the axes are
    planes = [Group(name=f"p{n}", axes=tuple(axes)) for n, axes in enumerate(chosen)]
    groups: dict[tuple[int, ...], str] = {}
    for group in (*lines.values(), *planes):
        for rank in range(mesh.size):
            members = group.members(mesh, mesh.coordinates(rank))
            groups.setdefault(members, str(len(groups) + 1))
    ranks = [
        [
            node(number, NodeKind.COMM_COLL, comm_type=0, comm_size=8, pg_name=name)
            for number, name in enumerate(
                groups[group.members(mesh, mesh.coordinates(rank))]
                for group in (*lines.values(), *planes)
            )
        ]
        for rank in range(mesh.size)
    ]
    table = {name: list(members) for members, name in groups.items()}
    schedule = document_of("grid", ranks, table).schedule
    for rank in range(mesh.size):
        coordinates = schedule.mesh.coordinates(rank)
        for each, given_ in zip(schedule.program_of(rank).step, ranks[rank], strict=True):
            group = schedule.group_by_name[each.group]  # type: ignore[union-attr]
            name = given_.attributes["pg_name"]
            assert isinstance(name, str)
            assert list(group.members(schedule.mesh, coordinates)) == table[name]


@pytest.mark.parametrize(
    ("nodes", "groups", "why"),
    [
        ([node(0), node(0)], {}, "rank 0: two nodes have one id"),
        (
            [node(0, NodeKind.COMP, 5, us=1)],
            {},
            "rank 0: node 0: data_deps: 5 is not the id of a node",
        ),
        ([node(0, NodeKind.COMP, 1), node(1, NodeKind.COMP, 0)], {}, "in a circle"),
        ([node(0, NodeKind.MEM_LOAD, tensor_size=5)], {}, "MEM_LOAD without a duration"),
        ([node(0, num_ops=-1)], {}, "num_ops: must be a whole number of at least 0"),
        ([node(0, NodeKind.COMM_COLL, comm_type=6, comm_size=5)], {}, "ALL_TO_ALL is not modelled"),
        ([node(0, NodeKind.COMM_COLL, comm_type=77)], {}, "comm_type: 77 is none of Chakra's"),
        ([node(0, NodeKind.COMM_COLL, pg_name="x")], {}, "pg_name: 'x' is no group; give comm_"),
        ([node(0, NodeKind.COMM_COLL, pg_name="1")], {"1": [2, 3]}, "does not hold the rank"),
        ([node(0, NodeKind.COMM_SEND, comm_dst=0)], {}, "its peer 0 is not another rank"),
        ([node(0, NodeKind.COMM_SEND, comm_dst=9)], {}, "its peer 9 is not another rank"),
        ([], {"1": [0, 9]}, "group 1: must hold ranks from 0 to 3"),
        ([], {"1": []}, "group 1: must hold ranks from 0 to 3"),
        ([], {"1": [0, 0]}, "group 1: holds a rank twice"),
        ([], {"1": [0, 3]}, "groups: are no lines of one grid of 4 ranks"),
        ([], {"1": [1, 2]}, "is no line of the grid"),
    ],
)
def test_what_no_schedule_says_is_one_line(
    nodes: list[ChakraNode], groups: dict[str, list[int]], why: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        document_of("wrong", [nodes, [], [], []], groups)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


SMALL = st.integers(0, 6)


@pytest.mark.one_commit_in(6)
@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.builds(
            lambda number, kind, deps, us, attributes: node(
                number, kind, *deps, us=us, **attributes
            ),
            SMALL,
            st.sampled_from(list(NodeKind)),
            st.lists(SMALL, max_size=2),
            st.sampled_from([0, 1, 2**63]),
            st.fixed_dictionaries(
                {},
                optional={
                    "comm_type": st.integers(0, 10),
                    "comm_size": st.sampled_from([0, 1, 7, 2**59, "x"]),
                    "pg_name": st.sampled_from(["1", "0", "", "z", 3]),
                    "comm_dst": st.integers(0, 4),
                    "comm_src": st.integers(0, 4),
                    "is_cpu_op": st.booleans(),
                    "stream": st.sampled_from(["s", "", "compute", "a\nb"]),
                    "num_ops": st.sampled_from([0, 5, 2**61]),
                },
            ),
        ),
        max_size=6,
        unique_by=lambda each: each.number,
    ),
    st.sampled_from([{}, {"1": [0, 1]}, {"1": [0, 1, 2, 3]}, {"1": [1, 3]}]),
)
def test_any_nodes_are_a_schedule_or_refused_in_one_line(
    nodes: list[ChakraNode], groups: dict[str, list[int]]
) -> None:
    said = ""
    try:
        document = document_of("any", [nodes, nodes, nodes, nodes], groups)
        assert document.schedule.mesh.size == 4
    except DocumentError as error:
        said = str(error)
    assert "\n" not in said
