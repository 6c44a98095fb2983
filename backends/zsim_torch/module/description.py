"""The `Model` of a user's module, measured on one micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.strategy.precision import Precision
from zsim_torch.ground.torch_dtype import DTYPE_OF_TORCH, TORCH_DTYPE, entering
from zsim_torch.module.autograd import call
from zsim_torch.module.block_result import cut
from zsim_torch.module.forward_plan import Symbol
from zsim_torch.module.module_state import unchanged
from zsim_torch.module.planned_module import PlannedModule
from zsim_torch.module.probe import value_or_probe
from zsim_torch.module.unit import ModuleUnitError, TorchUnit, UnitChoice, resolve
from zsim_torch.module.unwritten import UnwrittenMemory

BACKWARD_FLOPS = 2
"""FLOPs of a backward per FLOP of its forward: a product for the input, one for the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The size of one micro-batch of a rank; used in reports only."""

    sequences: int = 1
    tokens: int = 1


def describe(
    module: nn.Module,
    units: Sequence[UnitChoice] | None,
    batch: object,
    *,
    name: str = "module",
    precision: Precision = Precision.FP32,
    reads: Mapping[str, Sequence[str]] | None = None,
    size: BatchSize | None = None,
) -> Model:
    """Run each unit once on `batch` and return the `Model` of its parameters, outputs and cost.

    `reads` maps a unit to the names of its inputs: earlier units, for their results, and "batch".
    By default the first unit reads the batch and each later one the result of the one before; the
    last of several reads the batch, too. A module that is given under two names is called twice.
    Under mixed precision, float tensors in the batch are cast to its data type, as in training. The
    module and torch's generators are not changed; nothing is trained. Default units are those that
    `Trainer` finds.

    Raises:
        UnitError: the units do not make up the module, one returns something other than a tensor,
            or the last returns something other than one number.
    """
    if units is None:
        planned = PlannedModule(module, batch, dtype=precision.compute)
        return describe_planned(planned, name=name, size=size)
    resolved = resolve(module, units)
    size = size or BatchSize()
    batch = entering(batch, precision.compute)
    dtype = TORCH_DTYPE[precision.compute]
    values: dict[str, object] = {BATCH: batch}
    described: list[Unit] = []
    with unchanged(module, *(unit.module for unit in resolved)):
        for position, unit in enumerate(resolved):
            names = tuple((reads or {}).get(unit.name) or _default_reads(resolved, position))
            if missing := [other for other in names if other not in values]:
                raise ModuleUnitError(
                    f"unit {unit.name}: reads {missing[0]!r}, which no earlier unit makes"
                )
            given = [_entering(name, values[name]) for name in names]
            measured = _measure(unit, _parameters(module, unit, dtype), given)
            if len(measured.outputs) != 1:
                raise ModuleUnitError(
                    f"unit {unit.name}: it returns {len(measured.outputs)} tensors, 1 is described"
                )
            values[unit.name] = measured.outputs[0]
            called = next(other.name for other in resolved if other.module is unit.module)
            outputs = (_value(unit.name, measured.outputs[0]),)
            made = _unit(unit, names, outputs, measured, dtype=precision.compute)
            described.append(made if called == unit.name else replace(made, module=called))
    loss = described[-1].segments[-1].outputs[-1]
    if loss.elements != 1:
        raise ModuleUnitError(
            f"unit {described[-1].name}: the loss has {loss.elements} elements, not 1"
        )
    return _model(name, described, batch_value(batch), size)


def describe_planned(
    planned: PlannedModule, *, name: str = "module", size: BatchSize | None = None
) -> Model:
    """Return the `Model` of a module whose forward is planned ahead, on its first micro-batch."""
    values: dict[Symbol, tuple[Value, torch.Tensor]] = {}
    described: list[Unit] = []
    batch = Value(
        name=BATCH,
        elements=max(planned.first.size_bytes, 1),
        dtype=DType.INT8,
        requires_gradient=False,
    )
    with unchanged(planned.module):
        for unit in planned.units:
            plan = planned.first.plans[unit.name]
            known = [values[symbol] for symbol in plan.inputs]
            given = [cut(each.requires_grad_(value.requires_gradient)) for value, each in known]
            measured = _measure(unit, planned.values_of(unit), [*given, planned.first])
            for number, (symbol, made) in enumerate(
                zip(plan.outputs, measured.outputs, strict=True)
            ):
                sloped = number < plan.sloped
                value = replace(
                    _value(f"{unit.name}/output{number}", made), requires_gradient=sloped
                )
                values[symbol] = (value, made.detach())
            names = (*(value.name for value, _ in known), BATCH)
            outputs = tuple(values[symbol][0] for symbol in plan.outputs)
            made_of = _unit(unit, names, outputs, measured, dtype=planned.dtype)
            called = next(other.name for other in planned.units if other.module is unit.module)
            again = bool(plan.block) and called != unit.name
            described.append(
                replace(made_of, module=called if again else "", checkpoint=bool(plan.block))
            )
    return _model(name, described, batch, size or BatchSize())


def _model(name: str, units: Sequence[Unit], batch: Value, size: BatchSize) -> Model:
    forward = sum(kernel.flops for unit in units for kernel in unit.segments[0].forward)
    return Model(
        name=name,
        units=tuple(units),
        batch=batch,
        micro_batch_size=size.sequences,
        tokens=size.tokens,
        forward_flops=forward,
        backward_flops=BACKWARD_FLOPS * forward,
    )


def _default_reads(units: Sequence[TorchUnit], position: int) -> tuple[str, ...]:
    if position == 0:
        return (BATCH,)
    before = units[position - 1].name
    return (before, BATCH) if position == len(units) - 1 else (before,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredUnit:
    outputs: tuple[torch.Tensor, ...]
    saved_bytes: int
    saves_input: bool
    flops: int
    touched_bytes: int


def _parameters(module: nn.Module, unit: TorchUnit, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the parameters of a unit in a data type, or stand-ins for those on "meta"."""
    found = {name: value_or_probe(module.get_parameter(name), name, dtype) for name in unit.names}
    return [
        each.contiguous().requires_grad_(name not in unit.frozen) for name, each in found.items()
    ]


def _measure(
    unit: TorchUnit,
    parameters: Sequence[torch.Tensor],
    given: Sequence[object],
) -> _MeasuredUnit:
    known = _pointers(parameters)
    inputs = _pointers(tree_leaves(given))
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    counter = FlopCounterMode(display=False)
    named = dict(zip(unit.names, parameters, strict=True))
    unwritten = UnwrittenMemory(unit.name, named, tree_leaves(given))
    keeping = saved_tensors_hooks(keep, lambda kept: kept)
    with torch.enable_grad(), counter, keeping, unwritten:
        outputs = call(unit, parameters, given)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in saved
        if tensor.numel()
    }
    touched = [*parameters, *outputs, *(x for x in given if isinstance(x, torch.Tensor))]
    return _MeasuredUnit(
        outputs=tuple(each.detach().requires_grad_(each.requires_grad) for each in outputs),
        saved_bytes=sum(
            count for pointer, count in storages.items() if pointer not in known | inputs
        ),
        saves_input=any(pointer in inputs for pointer in storages),
        flops=counter.get_total_flops(),
        touched_bytes=sum(tensor.numel() * tensor.element_size() for tensor in touched),
    )


def _entering(name: str, value: object) -> object:
    """Return an input of a unit: the batch itself, or a copy with the same requires_grad."""
    if name == BATCH or not isinstance(value, torch.Tensor):
        return value
    return cut(value)


def _pointers(tensors: Sequence[object]) -> set[int]:
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    }


def _unit(
    unit: TorchUnit,
    names: tuple[str, ...],
    outputs: tuple[Value, ...],
    measured: _MeasuredUnit,
    *,
    dtype: DType,
) -> Unit:
    parameters = tuple(
        Parameter(name=name, shape=tuple(shape), frozen=name in unit.frozen)
        for name, shape in zip(unit.names, unit.shapes, strict=True)
    )
    segment = Segment(
        inputs=names,
        outputs=outputs,
        parameters=unit.names,
        saved_bytes=measured.saved_bytes,
        saves_input=measured.saves_input,
        forward=(_kernel(measured, dtype, times=1),),
        backward=(_kernel(measured, dtype, times=BACKWARD_FLOPS),),
    )
    return Unit(name=unit.name, parameters=parameters, segments=(segment,))


def _kernel(measured: _MeasuredUnit, dtype: DType, *, times: int) -> Kernel:
    """Return one kernel for the whole unit: a matrix product if it has any, else elementwise."""
    kind = KernelKind.MATMUL if measured.flops else KernelKind.ELEMENTWISE
    flops = measured.flops or sum(each.numel() for each in measured.outputs)
    return Kernel(kind=kind, flops=times * flops, bytes=times * measured.touched_bytes, dtype=dtype)


def _value(name: str, tensor: torch.Tensor) -> Value:
    """Return a tensor as a value; data types that schedules lack are counted in bytes.

    Raises:
        ModuleUnitError: it has a gradient in such a data type.
    """
    dtype = DTYPE_OF_TORCH.get(tensor.dtype)
    if dtype is None and tensor.requires_grad:
        raise ModuleUnitError(
            f"{name}: {tensor.dtype} has no gradient in a schedule; return real numbers "
            "(torch.view_as_real)"
        )
    return Value(
        name=name,
        elements=tensor.numel() * (1 if dtype is not None else tensor.element_size()),
        dtype=dtype or DType.INT8,
        requires_gradient=tensor.requires_grad,
    )


def batch_value(batch: object) -> Value:
    """Return the tensors of the batch as one value; in bytes if their data types differ."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    formats = {DTYPE_OF_TORCH.get(tensor.dtype) for tensor in tensors}
    only = formats.pop() if len(formats) == 1 else None
    elements = sum(
        tensor.numel() * (1 if only is not None else tensor.element_size()) for tensor in tensors
    )
    return Value(name=BATCH, elements=elements, dtype=only or DType.INT8, requires_gradient=False)
