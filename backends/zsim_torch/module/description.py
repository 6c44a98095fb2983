"""The `Model` of a user's module, measured on one micro-batch."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
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
from zsim_torch.execute.generator_state import RandomState
from zsim_torch.module.autograd import call
from zsim_torch.module.unit import ModuleUnitError, TorchUnit, UnitChoice, resolve
from zsim_torch.torch_dtype import DTYPE_OF_TORCH, TORCH_DTYPE, entering

BACKWARD_FLOPS = 2
"""FLOPs of a backward per FLOP of its forward: a product for the input, one for the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The size of one micro-batch of a rank, for reports alone."""

    sequences: int = 1
    tokens: int = 1


def describe(
    module: nn.Module,
    units: Sequence[UnitChoice],
    batch: object,
    *,
    name: str = "module",
    precision: Precision = Precision.FP32,
    reads: Mapping[str, Sequence[str]] | None = None,
    size: BatchSize | None = None,
) -> Model:
    """Run each unit once on `batch`, and say what it holds, makes, saves and costs.

    `reads` names for a unit what it is called with: earlier units, for what they return, and
    "batch". By default the first reads the batch, each other one what the one before returned, and
    the last the batch as well where there are several. A module that is given under two names is
    called twice. Under mixed precision tensors of floats in
    the batch are cast to its format, as they are in training. The module and torch's generators are
    not changed; nothing is trained.

    Raises:
        UnitError: the units do not make up the module, one returns something else than a tensor, or
            the last something else than one number.
    """
    resolved = resolve(module, units)
    size = size or BatchSize()
    batch = entering(batch, precision.compute)
    dtype = TORCH_DTYPE[precision.compute]
    parameters = {
        key: parameter.detach().to(dtype).requires_grad_(parameter.requires_grad)
        for key, parameter in module.named_parameters()
    }
    values: dict[str, object] = {BATCH: batch}
    described: list[Unit] = []
    for position, unit in enumerate(resolved):
        names = tuple((reads or {}).get(unit.name) or _default_reads(resolved, position))
        if missing := [other for other in names if other not in values]:
            raise ModuleUnitError(
                f"unit {unit.name}: reads {missing[0]!r}, which no earlier unit makes"
            )
        with _unchanged(unit.module):
            measured = _measure(unit, [parameters[key] for key in unit.names], names, values)
        values[unit.name] = measured.output
        called = next(other.name for other in resolved if other.module is unit.module)
        made = _unit(unit, names, measured, precision.compute)
        described.append(made if called == unit.name else replace(made, module=called))
    loss = described[-1].segments[-1].outputs[-1]
    if loss.elements != 1:
        raise ModuleUnitError(
            f"unit {described[-1].name}: the loss has {loss.elements} elements, not 1"
        )
    forward = sum(kernel.flops for unit in described for kernel in unit.segments[0].forward)
    return Model(
        name=name,
        units=tuple(described),
        batch=batch_value(batch),
        micro_batch_size=size.sequences,
        tokens=size.tokens,
        forward_flops=forward,
        backward_flops=BACKWARD_FLOPS * forward,
    )


@contextmanager
def _unchanged(module: nn.Module) -> Generator[None]:
    """Give buffers and generators back what they had before."""
    random = RandomState.now()
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        random.set()
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _default_reads(units: Sequence[TorchUnit], position: int) -> tuple[str, ...]:
    if position == 0:
        return (BATCH,)
    before = units[position - 1].name
    return (before, BATCH) if position == len(units) - 1 else (before,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredUnit:
    output: torch.Tensor
    saved_bytes: int
    saves_input: bool
    flops: int
    touched_bytes: int


def _measure(
    unit: TorchUnit,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    values: Mapping[str, object],
) -> _MeasuredUnit:
    given = [_entering(name, values[name]) for name in names]
    known = _pointers(parameters)
    inputs = _pointers(tree_leaves(given))
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    counter = FlopCounterMode(display=False)
    with torch.enable_grad(), counter, saved_tensors_hooks(keep, lambda kept: kept):
        outputs = call(unit, parameters, given)
    if len(outputs) != 1:
        raise ModuleUnitError(
            f"unit {unit.name}: it returns {len(outputs)} tensors, 1 is described"
        )
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in saved
        if tensor.numel()
    }
    touched = [*parameters, *outputs, *(x for x in given if isinstance(x, torch.Tensor))]
    return _MeasuredUnit(
        output=outputs[0].detach().requires_grad_(outputs[0].requires_grad),
        saved_bytes=sum(
            count for pointer, count in storages.items() if pointer not in known | inputs
        ),
        saves_input=any(pointer in inputs for pointer in storages),
        flops=counter.get_total_flops(),
        touched_bytes=sum(tensor.numel() * tensor.element_size() for tensor in touched),
    )


def _entering(name: str, value: object) -> object:
    """Return what a unit is called with: differentiable if what made it is, never the batch."""
    if name == BATCH or not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


def _pointers(tensors: Sequence[object]) -> set[int]:
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    }


def _unit(unit: TorchUnit, names: tuple[str, ...], measured: _MeasuredUnit, dtype: DType) -> Unit:
    parameters = tuple(
        Parameter(name=name, shape=tuple(shape), frozen=name in unit.frozen)
        for name, shape in zip(unit.names, unit.shapes, strict=True)
    )
    segment = Segment(
        inputs=names,
        outputs=(_value(unit.name, measured.output),),
        parameters=unit.names,
        saved_bytes=measured.saved_bytes,
        saves_input=measured.saves_input,
        forward=(_kernel(measured, dtype, times=1),),
        backward=(_kernel(measured, dtype, times=BACKWARD_FLOPS),),
    )
    return Unit(name=unit.name, parameters=parameters, segments=(segment,))


def _kernel(measured: _MeasuredUnit, dtype: DType, *, times: int) -> Kernel:
    """All of a unit as one kernel: matrix products where it has some."""
    kind = KernelKind.MATMUL if measured.flops else KernelKind.ELEMENTWISE
    flops = measured.flops or measured.output.numel()
    return Kernel(kind=kind, flops=times * flops, bytes=times * measured.touched_bytes, dtype=dtype)


def _value(name: str, tensor: torch.Tensor) -> Value:
    return Value(
        name=name,
        elements=tensor.numel(),
        dtype=DTYPE_OF_TORCH[tensor.dtype],
        requires_gradient=tensor.requires_grad,
    )


def batch_value(batch: object) -> Value:
    """Return the tensors of the batch as one value, in bytes where their formats differ."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    formats = {DTYPE_OF_TORCH.get(tensor.dtype) for tensor in tensors}
    only = formats.pop() if len(formats) == 1 else None
    elements = sum(
        tensor.numel() * (1 if only is not None else tensor.element_size()) for tensor in tensors
    )
    return Value(name=BATCH, elements=elements, dtype=only or DType.INT8, requires_gradient=False)
