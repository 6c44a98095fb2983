"""Forward and backward of segments, computed by the stand-ins from operands."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zsim.schedule.operation import Action, Compute, Role
from zsim_des.values import stand_in
from zsim_des.values.field import Numbers, joined


def _name(compute: Compute) -> str:
    return f"{compute.unit}/{compute.segment}"


def forward(compute: Compute, of: Callable[[Role], list[Numbers]], drawn: str) -> Sequence[Numbers]:
    """Return the outputs of a forward, in the order of its operands, with random mask `drawn`."""
    sizes = [len(each) for each in of(Role.OUTPUT)]
    made = stand_in.forward(f"{_name(compute)}{drawn}", of(Role.INPUT), of(Role.PARAMETER), sizes)
    saved = [np.full(len(each), made.saved) for each in of(Role.SAVED)]
    made_of = {Role.OUTPUT: made.outputs, Role.SAVED: saved, Role.WORKSPACE: _nothing(of)}
    return _in_order(compute, made_of)


def backward(
    compute: Compute, of: Callable[[Role], list[Numbers]], trained: Sequence[bool]
) -> Sequence[Numbers]:
    """Return the outputs of a backward, or of one of its two parts, in the order of its operands.

    The first part passes the reduced gradient of the outputs (the slope) to the second.

    Raises:
        ValueError: its gradient operands do not match the parameters that are `trained`.
    """
    left = of(Role.INTERMEDIATE_GRADIENT)
    if compute.action is Action.BACKWARD_WEIGHT:
        slope = stand_in.common_value(joined(left))
    else:
        slope = stand_in.slope_of(_name(compute), of(Role.OUTPUT_GRADIENT))
    made = stand_in.backward(
        _name(compute),
        inputs=of(Role.INPUT),
        saved=of(Role.SAVED),
        parameters=of(Role.PARAMETER),
        slope=slope,
        sizes=[len(each) for each in of(Role.INPUT_GRADIENT)],
    )
    made_of: dict[Role, Sequence[Numbers]] = {Role.WORKSPACE: _nothing(of)}
    if compute.action is Action.BACKWARD_INPUT:
        made_of[Role.INTERMEDIATE_GRADIENT] = [np.full(len(each), slope) for each in left]
    else:
        gradients = [each for each, wanted in zip(made.parameters, trained, strict=True) if wanted]
        made_of[Role.GRADIENT] = _in_places(compute, gradients)
    if compute.action is not Action.BACKWARD_WEIGHT:
        made_of[Role.INPUT_GRADIENT] = made.inputs
    return _in_order(compute, made_of)


def _in_places(compute: Compute, gradients: Sequence[Numbers]) -> list[Numbers]:
    """Return gradients for each gradient operand; empty operands get empty gradients."""
    made = [each for each in gradients if each.size]
    sizes = [each.view.size for each in compute.operands if each.role is Role.GRADIENT]
    if sum(map(bool, sizes)) != len(made):
        why = f"room for {len(sizes)} gradients, {len(made)} are made"
        raise ValueError(f"{compute.id}: {why}")
    left = iter(made)
    return [next(left) if size else np.zeros(0) for size in sizes]


def _nothing(of: Callable[[Role], list[Numbers]]) -> list[Numbers]:
    """Return the contents of the workspace: NaN, which no operation may read."""
    return [np.full(len(each), np.nan) for each in of(Role.WORKSPACE)]


def _in_order(compute: Compute, made: Mapping[Role, Sequence[Numbers]]) -> Sequence[Numbers]:
    """Return outputs by role in the order of the operands.

    Raises:
        ValueError: the number of operands of a role differs from the number of outputs.
    """
    left = {role: list(values) for role, values in made.items()}
    for role, values in left.items():
        count = sum(operand.role is role for operand in compute.operands)
        if count != len(values):
            raise ValueError(f"{compute.id}: {count} operands {role}, {len(values)} are made")
    return [left[operand.role].pop(0) for operand in compute.operands if operand.role in left]
