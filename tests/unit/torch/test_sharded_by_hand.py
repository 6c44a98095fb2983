"""What runtimes do with parameters that are padded one by one, written by hand, on real ranks."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_by_hand import ByHand, OfRank, all_by_hand
from sharded_net import Flow, by_plain_loop
from shared_ranks import SharedPools
from torch import nn

import zsim_topologies
from zsim.backend.backend import Backend, Job, load_backend
from zsim.compute.roofline import touched_bytes
from zsim.dtype import DType
from zsim.memory import memory_ledger
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.network.volume import communications, is_scalar, ring_equivalent_bytes
from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.issue_order import issued
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Copy, FreeMode, Role, StreamOperation
from zsim.schedule.schedule import Schedule
from zsim_torch.capability import of_units
from zsim_torch.module.unit import resolve
from zsim_torch.rank_result import state_peak


def flows(data: int, replicate: int = 1, inner: int | None = None) -> list[Flow]:
    plain = Flow(data=data, replicate=replicate, inner=inner)
    found = [
        plain,
        replace(plain, poison=True, free=FreeMode.HOST, clip=True),
        replace(plain, free=FreeMode.DEFERRED, average=True, poison=True),
        replace(plain, in_place=True, adam=True, poison=True),
        replace(plain, parameter=DType.BF16, clip=True, in_place=True, average=True),
        replace(plain, together=True, clip=True, poison=True),
        replace(plain, windows=True, adam=True, poison=True),
    ]
    if replicate > 1:
        found.append(replace(plain, copies=True, clip=True, together=True))
    if inner is not None:
        found += [
            replace(plain, secondary=True, poison=True, together=True),
            replace(plain, secondary=True, parameter=DType.BF16, free=FreeMode.DEFERRED),
        ]
    return found


SHAPE = GPT(layers=1, hidden_size=6, attention_heads=2, sequence_length=4, vocab_size=11)
MODEL = gpt(SHAPE, micro_batch_size=1)
CLUSTER = zsim_topologies.load("dgx_a100_infiniband")
pytestmark = pytest.mark.matrix(9, together=True)
GRIDS = [(2, 1, None), (3, 1, None), (2, 2, None), (4, 1, 2), (1, 2, None)]


@cache
def trained(
    pool_of: SharedPools, data: int, replicate: int, inner: int | None
) -> tuple[OfRank, ...]:
    """What each rank has after all flows: two tests look at it."""
    pool = pool_of(data * replicate)
    return pool.run(all_by_hand, flows(data, replicate, inner))


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("data", "replicate", "inner"), GRIDS)
def test_a_flow_of_gathers_in_place_trains_as_one_process_does(
    pool_of: SharedPools, data: int, replicate: int, inner: int | None
) -> None:
    by_rank = trained(pool_of, data, replicate, inner)
    for index, flow in enumerate(flows(data, replicate, inner)):
        wanted = by_plain_loop(flow)
        for found in by_rank:
            parameters = found[index][0]
            assert set(parameters) == set(wanted)
            for name, value in wanted.items():
                assert torch.allclose(parameters[name], value, rtol=0, atol=1e-6), (flow, name)


@pytest.mark.parametrize(("data", "replicate", "inner"), GRIDS)
def test_such_schedules_pass_check(data: int, replicate: int, inner: int | None) -> None:
    for flow in flows(data, replicate, inner):
        assert check(ByHand(flow).write()) == ()


def expected_volume(flow: Flow) -> dict[str, float]:
    """Bytes and counts of all steps, by the names that the observer gives them."""
    schedule = ByHand(flow).write()
    (program,) = schedule.programs
    found: defaultdict[str, float] = defaultdict(float)
    for _, operation in issued(program, flow.steps):
        for member in communications(operation):
            count = schedule.group_by_name[member.group].size(schedule.mesh)
            what = "scalar_wire" if is_scalar(member) else "wire"
            key = f"{member.group}/{member.name}"
            found[f"{what}_bytes/{key}"] += ring_equivalent_bytes(member, count)
            found[f"{what}_count/{key}"] += 1
    return dict(found)


@pytest.mark.one_commit_in(18)
@pytest.mark.parametrize(("data", "replicate", "inner"), [(2, 2, None), (4, 1, 2)])
def test_memory_and_volume_are_those_of_the_schedule(
    pool_of: SharedPools, data: int, replicate: int, inner: int | None
) -> None:
    by_rank = trained(pool_of, data, replicate, inner)
    for index, flow in enumerate(flows(data, replicate, inner)):
        (program,) = ByHand(flow).write().programs
        wanted = memory_ledger(program, flow.steps)
        for found in by_rank:
            _, observed, entries = found[index]
            assert observed["live_bytes_peak/state"] == observed["booked_bytes_peak/state"]
            if flow.free is not FreeMode.DEFERRED:  # when those return is a matter of time
                assert entries == [(entry.buffer, entry.change_bytes) for entry in wanted]
                assert observed["live_bytes_peak/state"] == state_peak(program, wanted)
            wire = {name: number for name, number in observed.items() if "wire_" in name}
            assert wire == expected_volume(flow)


@pytest.mark.parametrize("backend", ["null", "sim"])
@pytest.mark.parametrize(("data", "replicate", "inner"), [(2, 2, None), (4, 1, 2)])
def test_other_backends_run_the_same_operations_with_the_same_book(
    backend: str, data: int, replicate: int, inner: int | None
) -> None:
    for flow in flows(data, replicate, inner):
        schedule = ByHand(flow).write()
        (program,) = schedule.programs
        job = Job(schedule=schedule, model=MODEL, cluster=CLUSTER, steps=flow.steps)
        made: Backend = load_backend(backend)()
        assert made.refusal(job) is None
        trace = made.run(job, seed=0)
        assert sum(one.stands_for for one in trace.ranks) == schedule.mesh.size
        for one in trace.ranks:
            if flow.free is not FreeMode.DEFERRED:
                assert one.book == memory_ledger(program, flow.steps)
            volume: defaultdict[str, float] = defaultdict(float)
            for transfer in one.transfers:
                what = "scalar_wire" if transfer.scalar else "wire"
                key = f"{transfer.group}/{transfer.collective}"
                volume[f"{what}_bytes/{key}"] += transfer.bytes
                volume[f"{what}_count/{key}"] += 1
            assert dict(volume) == expected_volume(flow)
            ran = Counter((event.step, event.operation) for event in one.events)
            assert ran == Counter(
                (step, operation.id)
                for step, operation in issued(program, flow.steps)
                if isinstance(operation, StreamOperation)
            )


def test_the_simulation_charges_a_copy_by_parameter_for_what_moves() -> None:
    (program,) = ByHand(Flow(data=2)).write().programs
    by_parameter = program.by_id["step/body/forward/out"]
    cast = program.by_id["step/body/forward/in"]
    assert isinstance(by_parameter, Copy)
    assert isinstance(cast, Copy)
    # 16 elements are gathered, 12 are parameters; the shard has 8.
    assert touched_bytes(by_parameter, program) == 2 * 12 * 4
    assert touched_bytes(cast, program) == 2 * 8 * 4


def reads_blocks(columns: int) -> Schedule:
    """A unit that computes with what two ranks have gathered block by block."""
    build = ScheduleBuilder.of("blocks", data=2)
    weight = Piece(parameter="weight", start=0, size=2 * columns)
    bias = Piece(parameter="bias", start=2 * columns, size=2)
    blocks = (0, 2 * columns)
    elements = 2 * columns + 2
    build.layout(
        Layout(name="b", pieces=(weight, bias), elements=elements, axis="data", blocks=blocks)
    )
    gathered = build.buffer("gathered", elements, layout="b")
    out = build.buffer("out", 2, produced=True)
    build.step.allocate(gathered, out)
    operands = [
        (Role.PARAMETER, gathered[: weight.end]),
        (Role.PARAMETER, gathered[weight.end :]),
        (Role.OUTPUT, out.all),
    ]
    build.step.compute("run", Action.FORWARD, operands, unit="linear")
    build.step.free(gathered, out)
    return build.schedule()


def test_a_unit_that_computes_with_blocks_of_several_ranks_is_refused() -> None:
    module = nn.Sequential()
    module.add_module("linear", nn.Linear(3, 2))
    schedule = reads_blocks(3)
    (program,) = schedule.programs
    reason = of_units(schedule, program, resolve(module, ("linear",)))
    assert reason is not None
    assert "buffer gathered: elements 0 to 6 are no whole parameter; copy by parameter" in reason


@given(st.integers(1, 4), st.integers(1, 9))
def test_one_parameter_in_one_block_lies_whole_where_it_was_gathered(ranks: int, rows: int) -> None:
    size = ranks * rows
    build = ScheduleBuilder.of("one", data=ranks)
    piece = Piece(parameter="linear.weight", start=0, size=size)
    build.layout(Layout(name="b", pieces=(piece,), elements=size, axis="data", blocks=(0,)))
    gathered, out = build.buffer("gathered", size, layout="b"), build.buffer("out", 1)
    build.step.allocate(gathered, out)
    operands = [(Role.PARAMETER, gathered.all), (Role.OUTPUT, out.all)]
    build.step.compute("run", Action.FORWARD, operands, unit="linear")
    build.step.free(gathered, out)
    schedule = build.schedule()
    (program,) = schedule.programs
    module = nn.Sequential()
    module.add_module("linear", nn.Linear(size, 1, bias=False))
    assert of_units(schedule, program, resolve(module, ("linear",))) is None
