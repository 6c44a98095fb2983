"""ZeRO-R: checkpoints in host memory (Pa+cpu), fused buffers (CB), memory in a row (MD)."""

import pytest

from zsim.analysis.schedule_plan import plan
from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.closed_form.offloaded import host_bytes
from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.cluster.host_side import Host
from zsim.dtype import DType
from zsim.memory import memory_ledger, peak_bytes, reserve
from zsim.model.architecture import GPT, Attention
from zsim.model.gpt import gpt
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Allocate, AllReduce, Compute, Free
from zsim.schedule.replace import replace
from zsim.schedule.schedule import HostBytes, Kind, Program
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import FusedBuffers
from zsim.trace.trace import Trace
from zsim_des import SimBackend

LAYERS = 4
SHAPE = GPT(layers=LAYERS, hidden_size=64, attention_heads=4, sequence_length=32, vocab_size=61)
CHECKPOINT_BYTES = 2 * 32 * 64 * 2
"""Two sequences of 32 tokens, 64 wide, in fp16: what a block is given."""

FULL = Strategy(
    parallel=Parallel(data=2),
    zero=Zero(stage=2),
    activations=Activations(checkpointing=Checkpointing.FULL),
    train=Train(precision=Precision.FP16, gradient_accumulation_steps=2),
)
CPU = FULL.but({"offload.checkpoints": "host"})


def model(strategy: Strategy) -> Model:
    return gpt(
        SHAPE,
        micro_batch_size=2,
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
    )


def program(strategy: Strategy) -> Program:
    (made,) = make_schedule(model(strategy), strategy).programs
    return made


def box(*, pcie: int = 10**10, memory_bytes: int = 10**9) -> Cluster:
    """Nodes of 4 GPUs, two on a PCIe switch."""
    return Cluster(
        name="boxes",
        nodes=2,
        gpus_per_node=4,
        gpu=Gpu(
            name="gpu",
            memory_bytes=10**9,
            memory_bytes_per_s=10**11,
            rates=tuple(
                Rate(dtype=dtype, peak=10**11, matmul=10**11, elementwise=10**11) for dtype in DType
            ),
        ),
        switch_link=Link(bytes_per_s=10**10),
        nics_per_node=4,
        nic_link=Link(bytes_per_s=10**9),
        pcie_link=Link(bytes_per_s=pcie),
        gpus_per_pcie_switch=2,
        host=Host(memory_bytes=memory_bytes, memory_bytes_per_s=10**11),
    )


def simulated(strategy: Strategy, cluster: Cluster) -> tuple[Job, Trace]:
    subject = model(strategy)
    job = Job(schedule=make_schedule(subject, strategy), model=subject, cluster=cluster, steps=2)
    return job, SimBackend().run(job, seed=0)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("partition", [False, True])
def test_links_to_the_host_carry_each_checkpoint_once_each_way(
    tensor: int, *, partition: bool
) -> None:
    strategy = CPU.but(
        {"parallel.data": 4, "parallel.tensor": tensor, "activations.partition": partition}
    )
    cut = tensor if partition else 1
    once = 2 * LAYERS * CHECKPOINT_BYTES // cut  # two micro-batches
    assert host_bytes(model(strategy), strategy) == HostBytes(to_host=once, from_host=once)
    _, trace = simulated(strategy, box())
    carried = {link.link: link.bytes for link in trace.links}
    assert carried["pcie->host"] == carried["host->pcie"] == strategy.ranks * once


def given(subject: Model) -> dict[str, str]:
    """What each block is given, by block, the last block first."""
    outputs = [unit.segments[-1].outputs[-1].name for unit in subject.units]
    units = [unit.name for unit in subject.units]
    pairs = list(zip(units[1:], outputs, strict=False))
    return dict(reversed([pair for pair in pairs if pair[0].startswith("block")]))


def test_a_checkpoint_is_copied_back_one_unit_ahead_and_no_sooner() -> None:
    order = [
        operation.unit if isinstance(operation, Compute) else operation.id.split("/fetch/")[1]
        for operation in program(CPU.but({"train.gradient_accumulation_steps": 1})).step
        if "/fetch/" in operation.id
        or (isinstance(operation, Compute) and operation.action is Action.BACKWARD)
        if not isinstance(operation, Allocate | Free)
    ]
    values = given(model(CPU))
    behind = ["head", *values][:LAYERS]
    assert [each for each in order if each in values.values()] == list(values.values())
    for unit, value in zip(behind, values.values(), strict=True):
        assert order[order.index(value) + 1] == unit


@pytest.mark.parametrize(("tensor", "most"), [(1, 2), (2, 2)])
def test_the_device_holds_checkpoints_of_two_units_at_most(tensor: int, most: int) -> None:
    strategy = CPU.but({"parallel.tensor": tensor, "activations.partition": True})
    made = program(strategy)
    values = set(given(model(strategy)).values())
    # Their own slices; without a tensor axis what forward made, and what was copied back.
    places = ("/part", "/returned") if tensor > 1 else ("", "/gathered")
    alive: set[str] = set()
    counts: list[int] = []
    for operation in made.step:
        if isinstance(operation, Allocate) and operation.buffer in {
            f"{value}{place}" for value in values for place in places
        }:
            alive.add(operation.buffer)
        elif isinstance(operation, Free):
            alive.discard(operation.buffer)
        counts.append(len(alive))
    assert max(counts) == most + (tensor == 1)  # and what the unit at hand makes


def test_copies_hide_behind_computation_where_pcie_is_fast_and_bound_the_step_where_it_is_not() -> (
    None
):
    without, _ = time_and_bytes(FULL, box())
    fast, _ = time_and_bytes(CPU, box())
    assert fast == pytest.approx(without, rel=0.02)
    slow = box(pcie=10**7)
    bound, once = time_and_bytes(CPU, slow)
    # Forward and backward take turns, and two GPUs share the way from their switch to the host.
    assert bound >= 2 * 2 * once / 10**7


def time_and_bytes(strategy: Strategy, cluster: Cluster) -> tuple[float, int]:
    job, trace = simulated(strategy, cluster)
    return summary(job, trace).step_time_s, plan(job.schedule, job.model).host_bytes.to_host


@pytest.mark.parametrize("contiguous", [False, True])
def test_the_host_memory_of_a_node_is_shared_by_its_ranks(*, contiguous: bool) -> None:
    strategy = CPU.but({"parallel.data": 8, "zero.contiguous": contiguous})
    needed = 4 * LAYERS * CHECKPOINT_BYTES  # four ranks on a node; one micro-batch at a time
    job, trace = simulated(strategy, box(memory_bytes=needed))
    assert trace.out_of_memory is None
    assert summary(job, trace).peak_host_bytes == needed
    _, trace = simulated(strategy, box(memory_bytes=needed - 4))
    assert trace.out_of_memory is not None
    assert trace.out_of_memory.pool == "host"
    assert trace.out_of_memory.capacity_bytes == needed // 4 - 1


def test_host_traffic_that_is_not_as_promised_is_found() -> None:
    subject = model(CPU)
    made = make_schedule(subject, CPU)
    promised = made.contract.host_bytes
    assert promised is not None
    lying = replace(made.contract, host_bytes=(replace(promised[0], from_host=1),))
    found = {each.operation for each in check(replace(made, contract=lying), subject)}
    assert found == {"contract/host_bytes", "host/from_host"}


def test_what_two_checkpointed_units_are_given_stays_where_it_is() -> None:
    def unit(name: str, *inputs: str) -> Unit:
        made = Value(name=f"{name}/made", elements=1 if name == "last" else 8, dtype=DType.FP16)
        return Unit(
            name=name,
            parameters=(Parameter(name=f"{name}.weight", shape=(4,)),),
            segments=(Segment(inputs=inputs, outputs=(made,), parameters=(f"{name}.weight",)),),
        )

    skips = Model(
        name="skips",
        units=(
            unit("first", BATCH),
            unit("middle", "first/made"),
            unit("last", "first/made", "middle/made"),
        ),
        batch=Value(name=BATCH, elements=4, dtype=DType.INT64, requires_gradient=False),
    )
    for contiguous in (False, True):
        strategy = CPU.but({"zero.contiguous": contiguous})
        made = make_schedule(skips, strategy)
        assert check(made, skips) == ()
        (found,) = made.programs
        assert {copy.id.rsplit("/fetch/")[-1] for copy in found.step if "/fetch/" in copy.id} >= {
            "middle/made"
        }
        assert not any("fetch/first/made" in each.id for each in found.step)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_fused_buffer_is_of_a_constant_size_or_the_models(stage: int) -> None:
    """The largest buffer for a collective of gradients, and the largest of their fp32 copies."""
    constant = FULL.but({"zero.stage": stage, "zero.bucket_elements": 20_000})
    found = {
        fused: [
            max(each.elements for each in program(strategy).buffers if each.name.endswith(suffix))
            for suffix in ("/gradient" if stage < 2 else "/staging", "/cast")
        ]
        for fused, strategy in (
            ("constant", constant),
            ("model", FULL.but({"zero.stage": stage, "zero.fused_buffers": FusedBuffers.MODEL})),
        )
    }
    everything = sum(each.elements for each in model(FULL).parameters)
    shards = 1 if stage == 0 else 2
    assert found["model"] == [everything, everything // shards]
    assert max(found["constant"]) <= 20_000
    assert found["constant"][1] <= 20_000 // shards


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_trainer_before_zero_reduces_all_gradients_in_fp32(precision: str) -> None:
    fused = {
        "zero.stage": 0,
        "zero.fused_buffers": FusedBuffers.MODEL,
        "train.precision": precision,
    }
    strategy = FULL.but(fused)
    made = make_schedule(model(strategy), strategy)
    assert check(made) == ()
    (found,) = made.programs
    (reduced,) = [
        each
        for each in found.step
        if isinstance(each, AllReduce) and each.source.buffer.startswith("bucket0/")
    ]
    assert reduced.wire is reduced.accumulate is DType.FP32
    copies = [name for name in found.by_name if name.endswith(("/fused", "/wide"))]
    assert len(copies) == (2 if precision == "bf16" else 0)


def holes(stage: int, layers: int, *, contiguous: bool) -> int:
    """What PyTorch's allocator reserves beyond what is allocated: blocks like those of table 7.

    Each buffer is one request, as the book has it: what comes and goes in a segment is no hole.
    """
    shape = GPT(
        layers=layers,
        hidden_size=8192,
        attention_heads=32,
        sequence_length=1024,
        vocab_size=50257,
        attention=Attention.PLAIN,
    )
    strategy = Strategy(
        parallel=Parallel(data=25, tensor=16),
        zero=Zero(stage=stage, contiguous=contiguous, bucket_elements=100_000_000),
        activations=Activations(checkpointing=Checkpointing.FULL, partition=True),
        train=Train(precision=Precision.FP16),
    )
    subject = gpt(shape, micro_batch_size=16, tensor=16, precision=Precision.FP16)
    made = make_schedule(subject, strategy)
    (planned,) = made.programs
    whole = tuple(replace(buffer, course=None) for buffer in planned.buffers)
    found = replace(planned, buffers=whole)
    entries = memory_ledger(found, 2)
    return reserve(found, entries, made.pools[0]).peak_bytes - peak_bytes(entries, "device")


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stage", [1, 2])
def test_holes_grow_with_the_layers_unless_what_lives_long_lies_in_a_row(stage: int) -> None:
    loose, row = (
        holes(stage, 16, contiguous=contiguous) - holes(stage, 6, contiguous=contiguous)
        for contiguous in (False, True)
    )
    assert 0 <= 3 * row < loose


def test_memory_in_a_row_is_taken_once_and_used_all_the_time() -> None:
    made = program(FULL.but({"zero.contiguous": True}))
    rows = [made.by_name[name] for name in made.persistent]
    kept = {each.name for each in rows if each.kind in (Kind.GRADIENT, Kind.SAVED)}
    assert sum(made.by_name[name].size_bytes for name in kept if "checkpoints" in name) == (
        LAYERS * CHECKPOINT_BYTES
    )
    touched = {each.buffer for each in made.step if isinstance(each, Allocate | Free)}
    assert kept
    assert not kept & touched
