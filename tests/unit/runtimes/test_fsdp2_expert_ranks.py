"""Experts of FSDP2 over ranks of their own: groups, gradients, and the collectives of PyTorch."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import cast

import pytest
import torch
from expert_model import expert_model
from faults.findings import families
from faults.schedules import edited
from fitting import fitting
from fsdp_order import issued
from fully_sharded import Collective, Recorder, pretended, tell
from megatron_pipelines import SHAPE as DEEP
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import Shard

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import Llama
from zsim.model.experts import Experts
from zsim.model.kernel import PRODUCTS
from zsim.model.model import Model, Unit
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    AllToAll,
    Operation,
    ReadCounts,
    ReduceScatter,
    Reduction,
    walk,
)
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy, Sync
from zsim_runtimes.fsdp2.placement import ShardPlacement
from zsim_torch.ground.torch_dtype import TORCH_DTYPE

EXPERTS = Experts(count=8, top_k=2, intermediate_size=6, shared_intermediate_size=4)
SHAPE = Llama(
    layers=2, hidden_size=8, attention_heads=2, sequence_length=16, vocab_size=6, experts=EXPERTS
)


def strategy_of(
    options: FSDP2, precision: Precision = Precision.BF16, /, **degrees: int
) -> Strategy:
    return Strategy(
        parallel=Parallel.of(degrees),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=2, precision=precision, clip_norm=1.0),
    )


def model_of(strategy: Strategy, experts: Experts = EXPERTS) -> Model:
    return fitting(replace(SHAPE, execution=strategy.execution, experts=experts), strategy)


@pytest.mark.parametrize(
    ("options", "precision", "degrees"),
    [
        (FSDP2(), Precision.BF16, {"data": 4, "expert": 2}),
        (FSDP2(), Precision.FP16, {"data": 4, "expert": 4}),
        (FSDP2(reduce_dtype=DType.FP32), Precision.BF16, {"data": 8, "expert": 2, "replicate": 2}),
        (FSDP2(gradient_sync=Sync.LAST), Precision.BF16, {"data": 4, "expert": 2}),
        (FSDP2(), Precision.BF16, {"data": 4, "context": 2, "expert": 4}),
        (FSDP2(), Precision.BF16, {"data": 2, "tensor": 2, "expert": 2}),
        (FSDP2(), Precision.BF16, {"data": 2, "tensor": 2, "expert": 4}),
        (FSDP2(), Precision.BF16, {"data": 4, "expert": 2, "pipeline": 2}),
        (FSDP2(offload_policy=OffloadPolicy.CPU), Precision.BF16, {"data": 4, "expert": 2}),
        (
            FSDP2(reshard_after_forward=False, reshard_after_backward=False),
            Precision.BF16,
            {"data": 4, "expert": 2},
        ),
    ],
)
def test_experts_with_ranks_of_their_own_are_proved(
    options: FSDP2, precision: Precision, degrees: dict[str, int]
) -> None:
    strategy = strategy_of(options, precision, **degrees)
    model = model_of(strategy)
    assert check(make_schedule(model, strategy), model) == ()


def test_experts_that_are_fewer_than_their_ranks_are_sharded_by_rows() -> None:
    strategy = strategy_of(FSDP2(), data=8, expert=2)
    model = model_of(strategy, replace(EXPERTS, count=4, intermediate_size=8))
    made = make_schedule(model, strategy)
    assert check(made, model) == ()
    padded = strategy_of(FSDP2(shard_placement_fn=ShardPlacement.FIRST), data=8, expert=2)

    def gathered(schedule: Schedule) -> int:
        return max(each.elements for each in issued(schedule) if each.ranks == 4)

    assert gathered(make_schedule(model, padded)) == 2 * gathered(made)  # 2 experts, 4 ranks


@pytest.mark.matrix(6)
@pytest.mark.parametrize("kept", Checkpointing)
@pytest.mark.parametrize(
    ("experts", "exchanges"),
    [
        (EXPERTS, 3),
        (replace(EXPERTS, bias=True, router_bias=True, shared_gate=True), 3),
        (replace(EXPERTS, capacity_factor=1.25, pads_to_capacity=True), 2),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_stay_at_the_source_and_counts_are_exchanged(
    kept: Checkpointing, experts: Experts, exchanges: int, *, compiled: bool
) -> None:
    strategy = strategy_of(FSDP2(), data=4, expert=2)
    strategy = strategy.but({"train.compile": compiled, "activations.checkpointing": kept})
    model = model_of(strategy, experts)
    schedule = make_schedule(model, strategy)
    assert check(schedule, model) == ()
    (program,) = schedule.programs
    names = [each.id for each in walk(program.step) if isinstance(each, AllToAll)]
    assert sum(name.startswith("step/forward/mb0/block0") for name in names) == exchanges
    assert sum("mb0/block0/backward" in name for name in names) == 2
    waits = [each for each in walk(program.step) if isinstance(each, ReadCounts)]
    assert len(waits) == (2 * 2 if exchanges == 3 else 0)  # layers and micro-batches


def test_rows_cross_twice_in_each_direction_and_counts_once() -> None:
    strategy = strategy_of(FSDP2(), data=4, expert=2)
    schedule = make_schedule(model_of(strategy), strategy)
    (sent,) = (
        each.bytes
        for each in schedule.contract.wire_bytes or ()
        if each.group == "expert" and each.collective == "all_to_all"
    )
    rows = 16 * EXPERTS.top_k * SHAPE.hidden_size * 2 // 2  # half of them stay, in bf16
    counts = EXPERTS.count * 8 // 2
    assert sent == SHAPE.layers * 2 * (4 * rows + counts)


def test_experts_have_the_parameters_and_the_work_of_other_runtimes() -> None:
    ours, theirs = (
        model_of(
            Strategy(
                parallel=Parallel(data=4, expert=2),
                zero=zero,
                train=Train(precision=Precision.BF16),
            )
        )
        for zero in (Zero(stage=3, emulate=FSDP2()), Zero(stage=3))
    )
    assert ours.parameter_count == theirs.parameter_count
    assert ours.forward_flops == theirs.forward_flops

    def products(model: Model) -> int:
        kernels = (
            kernel
            for unit in model.units
            for segment in unit.segments
            for kernel in (*segment.forward, *segment.backward)
        )
        return sum(each.flops for each in kernels if each.kind in PRODUCTS)

    assert products(ours) == products(theirs)


@cache
def made() -> tuple[Schedule, Model]:
    strategy = strategy_of(FSDP2(), data=4, expert=2)
    model = model_of(strategy)
    return make_schedule(model, strategy), model


def with_reductions(over: str, **fields: object) -> set[str]:
    """Return the families of findings if reductions `over` a group have other fields."""

    def change(each: Operation) -> Iterable[Operation]:
        is_it = isinstance(each, ReduceScatter) and each.group == over
        return (but(each, **fields) if is_it else each,)

    schedule, model = made()
    return set(families(edited(schedule, change), model))


@pytest.mark.parametrize("group", ["data", "expert_data"])
def test_a_mean_of_gradients_that_the_loss_has_divided_is_found(group: str) -> None:
    assert "values" in with_reductions(group, reduction=Reduction.AVERAGE)
    assert not with_reductions(group, reduction=Reduction.SUM)


def test_gradients_of_experts_that_are_summed_over_expert_ranks_are_found() -> None:
    assert "values" in with_reductions("expert_data", group="expert")  # as many ranks


@pytest.mark.parametrize(
    ("options", "degrees", "why"),
    [
        (FSDP2(), {"data": 4, "tensor": 2, "expert": 2, "expert_tensor": 2}, "must be 1 for FSDP2"),
        (FSDP2(reshard_after_forward=2), {"data": 4, "expert": 2}, "2 is not modelled with para"),
    ],
)
def test_degrees_and_options_that_torchtitan_lacks_are_refused(
    options: FSDP2, degrees: dict[str, int], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        strategy_of(options, **degrees)


class Block(nn.Module):
    """A unit whose output depends on all its parameters."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.experts = [number for number, each in enumerate(unit.parameters) if each.expert]
        self.weights = nn.ParameterList(torch.ones(each.shape) for each in unit.parameters)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.stack([each.sum() for each in self.weights]).sum()


class Stack(nn.Module):
    """Units in turn; the first of them read a batch without a gradient."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.units = nn.ModuleList(Block(unit) for unit in model.units)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            batch = unit(batch)
        return batch


def meshes(strategy: Strategy) -> tuple[DeviceMesh, DeviceMesh]:
    """The meshes of dense layers and of experts, whose ranks are neighbours."""
    replicas, experts = strategy.parallel.replicate, strategy.parallel.expert
    dense = init_device_mesh("cpu", (replicas, strategy.parallel.data), mesh_dim_names=("r", "d"))
    sparse = init_device_mesh(
        "cpu", (replicas, strategy.expert_data, experts), mesh_dim_names=("r", "efsdp", "ep")
    )
    if replicas == 1:
        return dense["d"], sparse["efsdp"]
    return dense, sparse["r", "efsdp"]


def info_of(mesh: DeviceMesh) -> FSDPMeshInfo:
    """The sharded and the replicated dimension of a mesh."""
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def wrapped(model: Model, strategy: Strategy, options: FSDP2) -> FSDPModule:
    """A stack in which `fully_shard` places experts on their own mesh, as torchtitan asks."""
    dense, sparse = meshes(strategy)
    infos = info_of(dense), info_of(sparse)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=None if options.reduce_dtype is None else TORCH_DTYPE[options.reduce_dtype],
        cast_forward_inputs=False,
    )
    root = Stack(model)
    blocks: list[FSDPModule] = []
    for unit, made_of in zip(root.units, model.units, strict=True):
        block = cast("Block", unit)
        if not made_of.checkpoint:
            continue
        experts = {block.weights[number] for number in block.experts}

        def place(
            parameter: nn.Parameter, own: set[torch.Tensor] = experts
        ) -> ShardPlacementResult:
            info = infos[parameter in own]
            by_rows = parameter in own and parameter.shape[0] < info.shard_mesh_size
            return ShardPlacementResult(placement=Shard(int(by_rows)), mesh_info=info)

        fully_shard(
            block,
            mesh=dense,
            mp_policy=policy,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=place,
        )
        blocks.append(cast("FSDPModule", block))
    whole = fully_shard(root, mesh=dense, mp_policy=policy)
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    whole.set_modules_to_backward_prefetch([blocks[-1]])
    whole.set_gradient_divide_factor(1.0)
    whole.set_reduce_scatter_max_input_buffers(options.reduce_scatter_max_input_buffers)
    return whole


def of_pytorch(model: Model, strategy: Strategy, options: FSDP2) -> list[Collective]:
    """The collectives of a step of PyTorch's `fully_shard` with two meshes."""
    with pretended(strategy.replicas):
        root = wrapped(model, strategy, options)
        recorder = Recorder()
        for _ in range(2):
            recorder.seen.clear()
            with recorder:
                for micro_batch in range(2):
                    tell(root, options, last=micro_batch == 1)
                    made = cast("nn.Module", root)(torch.ones(2, dtype=torch.bfloat16))
                    torch.autograd.backward(made.sum())
            cast("nn.Module", root).zero_grad()
        return list(recorder.seen)


@pytest.mark.parametrize(
    ("options", "degrees"),
    [
        (FSDP2(), {"data": 4, "expert": 2}),
        (FSDP2(reshard_after_forward=False), {"data": 4, "expert": 2}),
        (FSDP2(reshard_after_backward=False), {"data": 8, "expert": 4}),
        (FSDP2(gradient_sync=Sync.LAST), {"data": 4, "expert": 2}),
        (FSDP2(all_reduce=Sync.LAST), {"data": 4, "expert": 2, "replicate": 2}),
        (FSDP2(reduce_scatter_max_input_buffers=3), {"data": 8, "expert": 4}),
        (FSDP2(reduce_dtype=DType.FP32), {"data": 16, "expert": 8}),
    ],
)
def test_dense_layers_and_experts_are_gathered_and_reduced_as_by_fully_shard(
    options: FSDP2, degrees: dict[str, int]
) -> None:
    strategy = strategy_of(options, **degrees)
    model = expert_model(strategy, replace(DEEP, layers=4))
    over = {"data", "expert_data", "replicate"}
    made = make_schedule(model, strategy)
    found = [
        each
        for each in issued(made)
        if each.ranks in {g.size(made.mesh) for g in made.groups if g.name in over}
    ]
    assert found == of_pytorch(model, strategy, options)
