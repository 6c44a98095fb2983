"""Forward and backward of segments as the stand-ins have them, by operands."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zsim.schedule.operation import Compute, Role
from zsim_des.values import stand_in
from zsim_des.values.field import Numbers


def _name(compute: Compute) -> str:
    return f"{compute.unit}/{compute.segment}"


def forward(compute: Compute, of: Callable[[Role], list[Numbers]], drawn: str) -> Sequence[Numbers]:
    """Return what a forward writes, in the order of its operands, with random numbers `drawn`."""
    sizes = [len(each) for each in of(Role.OUTPUT)]
    made = stand_in.forward(f"{_name(compute)}{drawn}", of(Role.INPUT), of(Role.PARAMETER), sizes)
    saved = [np.full(len(each), made.saved) for each in of(Role.SAVED)]
    made_of = {Role.OUTPUT: made.outputs, Role.SAVED: saved, Role.WORKSPACE: _nothing(of)}
    return _in_order(compute, made_of)


def backward(
    compute: Compute, of: Callable[[Role], list[Numbers]], trained: Sequence[bool]
) -> Sequence[Numbers]:
    """Return what a backward writes, in the order of its operands.

    Raises:
        ValueError: it has room for other gradients than of the parameters that are `trained`.
    """
    made = stand_in.backward(
        _name(compute),
        inputs=of(Role.INPUT),
        saved=of(Role.SAVED),
        parameters=of(Role.PARAMETER),
        slopes=of(Role.OUTPUT_GRADIENT),
        sizes=[len(each) for each in of(Role.INPUT_GRADIENT)],
    )
    gradients = [each for each, wanted in zip(made.parameters, trained, strict=True) if wanted]
    return _in_order(
        compute,
        {
            Role.INPUT_GRADIENT: made.inputs,
            Role.GRADIENT: _in_places(compute, gradients),
            Role.WORKSPACE: _nothing(of),
        },
    )


def _in_places(compute: Compute, gradients: Sequence[Numbers]) -> list[Numbers]:
    """Gradients where a backward has room for them; those without elements are not told apart."""
    made = [each for each in gradients if each.size]
    sizes = [each.view.size for each in compute.operands if each.role is Role.GRADIENT]
    if sum(map(bool, sizes)) != len(made):
        why = f"room for {len(sizes)} gradients, {len(made)} are made"
        raise ValueError(f"{compute.id}: {why}")
    left = iter(made)
    return [next(left) if size else np.zeros(0) for size in sizes]


def _nothing(of: Callable[[Role], list[Numbers]]) -> list[Numbers]:
    """Return what a kernel leaves in its workspace: nothing that can be read."""
    return [np.full(len(each), np.nan) for each in of(Role.WORKSPACE)]


def _in_order(compute: Compute, made: Mapping[Role, Sequence[Numbers]]) -> Sequence[Numbers]:
    """Return what was made, by role, in the order of the operands.

    Raises:
        ValueError: it writes another number of tensors of a role than the kernel makes.
    """
    left = {role: list(values) for role, values in made.items()}
    for role, values in left.items():
        count = sum(operand.role is role for operand in compute.operands)
        if count != len(values):
            raise ValueError(f"{compute.id}: {count} operands {role}, {len(values)} are made")
    return [left[operand.role].pop(0) for operand in compute.operands if operand.role in left]
