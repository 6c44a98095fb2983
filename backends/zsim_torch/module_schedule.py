"""Build the schedule of a user's module: choose or find its units and learning rates."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import torch
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_torch.execute.optimizer_groups import RateGroups, with_optimizer
from zsim_torch.module.description import describe, describe_planned
from zsim_torch.module.expert_parts import ExpertParts
from zsim_torch.module.expert_unit import ExpertRanks
from zsim_torch.module.experts_module import blocks_around, experts_of
from zsim_torch.module.input_shape import InputShapes, noted_input_shapes
from zsim_torch.module.module_loss import LossOf
from zsim_torch.module.module_refusal import need_no_hooks, need_trained
from zsim_torch.module.planned_module import PlannedModule, has_forward
from zsim_torch.module.routed_rows import ExpertPlace
from zsim_torch.module.unit import ModuleUnitError, TorchUnit, UnitChoice, resolve

FIRST_BUCKET_BYTES: Final = 2**20
"""DistributedDataParallel's `_DEFAULT_FIRST_BUCKET_BYTES` (torch 2.13)."""

BUCKET_BYTES: Final = 25 * 2**20
"""DistributedDataParallel's default of `bucket_cap_mb` (torch 2.13), in bytes."""

LEAST_BUCKET_BYTES: Final = 2**19
"""Minimum bucket size in stage 2: with Gloo on two cores, smaller ones slow down steps."""


class HasStrategy(Protocol):
    """An object with a strategy, such as a scenario from `zsim.load`."""

    @property
    def strategy(self) -> Strategy:
        """Return the strategy for sharding and training the model."""
        ...


def planned_module(
    module: nn.Module,
    source: Schedule | Strategy | HasStrategy,
    units: Sequence[UnitChoice] | None,
    batch: object,
    *,
    loss: LossOf,
) -> PlannedModule | None:
    """Return the module with its units found automatically, or None.

    The result is None if units were chosen, if there is no batch, or if the module is just a
    sequence of its children.
    """
    if units is not None or batch is None or not has_forward(module):
        return None
    strategy = source.contract.strategy if isinstance(source, Schedule) else _strategy_of(source)
    precision = Precision.FP32 if strategy is None else strategy.train.precision
    plan = partial(PlannedModule, module, batch, dtype=precision.compute, loss=loss)
    if strategy is not None and strategy.parallel.expert > 1:
        return plan(blocks=blocks_around(module))
    if not experts_of(module):
        return plan()
    try:
        return plan()
    except ModuleUnitError as error:  # a router's logits may leave its block past the results
        try:
            return plan(blocks=blocks_around(module))
        except ModuleUnitError:
            raise error from None


def expert_ranks(
    planned: PlannedModule | Sequence[UnitChoice] | None, strategy: Strategy | None
) -> ExpertRanks | None:
    """Return the experts of a planned module on several ranks; None if each rank has all.

    Raises:
        RefusedError: units were chosen, or the experts do not fit the ranks.
    """
    if strategy is None or strategy.parallel.expert == 1:
        return None
    if not isinstance(planned, PlannedModule):
        raise RefusedError(
            f"parallel.expert: {strategy.parallel.expert} must be 1 for units of your own choice; "
            "leave units out, so that zsim finds the experts"
        )
    return ExpertRanks.of(planned, strategy.parallel.expert)


def schedule_of(  # noqa: PLR0917  (of the trainer's own)
    module: nn.Module,
    source: Schedule | Strategy | HasStrategy,
    units: PlannedModule | Sequence[UnitChoice],
    batch: object,
    reads: Mapping[str, Sequence[str]] | None,
    optimizer: torch.optim.Optimizer | Optimizer | None,
) -> tuple[Schedule, dict[str, float], InputShapes, Model | None]:
    """Return the schedule, learning rates by name, input shapes, and the model.

    The schedule is built unless `source` is one.

    Raises:
        RefusedError: a batch is needed but missing, or the optimizer is not supported.
    """
    if isinstance(source, Schedule):
        if optimizer is not None:
            raise RefusedError("optimizer: the schedule has its rules; give a strategy instead")
        return source, {}, {}, None
    need_trained(module)
    strategy, rates = with_optimizer(_strategy_of(source), module, optimizer)
    if batch is None:
        raise RefusedError("batch: missing; a micro-batch is needed to measure units on")
    if not isinstance(units, PlannedModule):
        made, shapes, model = _schedule_for(module, units, strategy, batch=batch, reads=reads)
        return made, rates, shapes, model
    _need_uncut(strategy)
    if strategy.parallel.pipeline > 1:
        raise RefusedError(
            f"parallel.pipeline: {strategy.parallel.pipeline} must be 1 where units are found; say "
            "units=..."
        )
    model = describe_planned(units)
    experts = expert_ranks(units, strategy)
    model = model if experts is None else experts.model(model)
    return make_schedule(model, with_buckets(strategy, model)), rates, {}, model


def with_buckets(strategy: Strategy, model: Model) -> Strategy:
    """Return `strategy` with buckets that are reduced during backward, unless it sets its own.

    Sizes are DistributedDataParallel's. In stage 2 a bucket holds all the gradients of other ranks'
    shards that a rank has, so it is at most as large as the largest unit, except for tiny models.
    Stage 3 keeps one bucket per unit, as in FSDP2, and an emulated runtime keeps its own.
    """
    zero = strategy.zero
    named = zero.model_fields_set & {"bucket_elements", "first_bucket_elements", "fused_buffers"}
    if named or zero.stage == 3 or zero.emulate is not None:
        return strategy
    size = strategy.train.precision.compute.size_bytes
    most = BUCKET_BYTES // size
    if zero.stage == 2:
        most = min(most, max(_largest_unit(model), LEAST_BUCKET_BYTES // size))
    return strategy.but(
        {
            "zero.first_bucket_elements": min(FIRST_BUCKET_BYTES // size, most),
            "zero.bucket_elements": most,
        }
    )


def _largest_unit(model: Model) -> int:
    """Return the largest number of trained elements of a unit."""
    return max(
        sum(each.elements for each in unit.parameters if not each.frozen) for unit in model.modules
    )


def _strategy_of(source: Strategy | HasStrategy) -> Strategy:
    """Return the strategy in a trainer's `source`.

    Raises:
        RefusedError: `source` contains none.
    """
    found = source if isinstance(source, Strategy) else getattr(source, "strategy", None)
    if not isinstance(found, Strategy):
        raise RefusedError(
            f"source: a {type(source).__name__} must be a Schedule, a Strategy, or a scenario as "
            "zsim.load returns it"
        )
    return found


def groups_of(
    schedule: Schedule,
    module: nn.Module,
    rates: Mapping[str, float],
    *,
    optimizer: torch.optim.Optimizer | Optimizer | None,
) -> RateGroups:
    """Return groups with learning rates: those of torch's optimizer, or of the schedule."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return RateGroups.of_torch(optimizer)
    return RateGroups.of_schedule(schedule, module, rates)


def unit_choices(module: nn.Module, units: Sequence[UnitChoice] | None) -> Sequence[UnitChoice]:
    """Return the chosen units, or by default the children of a sequential module."""
    if units is None and isinstance(module, nn.Sequential):
        return [name for name, _ in module.named_children()]
    if units is None:
        raise ModuleUnitError(
            f"units: missing; {type(module).__name__} has no forward, or no batch is given to find "
            "them with, so say which of its submodules are gathered and run as one"
        )
    return units


def units_of(
    module: nn.Module, units: PlannedModule | Sequence[UnitChoice]
) -> tuple[TorchUnit, ...]:
    """Return the units that make up `module`.

    Raises:
        ModuleUnitError: they do not make it up.
        RefusedError: hooks outside the chosen units would not be called.
    """
    if isinstance(units, PlannedModule):
        return units.units
    found = resolve(module, units)
    need_no_hooks(module, [each.module for each in found], forward_is_run=False)
    return found


def units_on(
    rank: int,
    module: nn.Module,
    units: PlannedModule | Sequence[UnitChoice],
    schedule: Schedule,
) -> tuple[tuple[TorchUnit, ...], ExpertParts | None]:
    """Return the units that make up `module` on a rank, and its parts of experts, if any.

    Raises:
        ModuleUnitError, RefusedError: as `units_of`; or experts do not fit the ranks.
    """
    experts = None
    if isinstance(units, PlannedModule):
        experts = expert_ranks(units, schedule.contract.strategy)
    if experts is None:
        return units_of(module, units), None
    own = ExpertPlace.of(schedule, schedule.mesh.coordinates(rank))
    return experts.units(own), experts.parts(own)


def _schedule_for(
    module: nn.Module,
    units: Sequence[UnitChoice],
    strategy: Strategy,
    *,
    batch: object,
    reads: Mapping[str, Sequence[str]] | None,
) -> tuple[Schedule, InputShapes, Model]:
    """Return the schedule for training `module` by `strategy`, input shapes, and the model.

    Raises:
        RefusedError: the strategy cuts matrices.
    """
    _need_uncut(strategy)
    expert_ranks(units, strategy)
    precision = strategy.train.precision
    with noted_input_shapes(resolve(module, units)) as shapes:
        model = describe(module, units, batch, precision=precision, reads=reads)
    return make_schedule(model, with_buckets(strategy, model)), shapes, model


def _need_uncut(strategy: Strategy) -> None:
    """Raise RefusedError if `strategy` cuts matrices."""
    tensor = strategy.parallel.tensor
    if tensor > 1:
        raise RefusedError(
            f"parallel.tensor: {tensor} must be 1 for a module of your own, whose matrices nothing "
            "cuts"
        )
