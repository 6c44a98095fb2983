"""Tensors inside a segment that backward computes again instead of reading kept ones.

Megatron-LM drops the output of a module, or all tensors inside one, and runs the module again
right before the backward of the operator that reads them first: `CheckpointWithoutOutput` and
`checkpoint` of megatron/core/tensor_parallel/random.py in August 2026 (d98e8a64).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from zsim.model.kernel import Kernel
from zsim.model.transformer.operator import Operator, Stretch


def recomputed(operators: Sequence[Operator], again: Collection[Operator]) -> tuple[Operator, ...]:
    """Return `operators` that keep no tensor made by one of `again`, which run twice.

    A tensor exists in backward from the first operator that reads it, to the last one.
    """
    made = {each.makes.name for each in again}
    dropped = {
        tensor.name: tensor.size_bytes
        for each in operators
        for tensor in each.saves
        if tensor.name in made
    }
    if not dropped:
        return tuple(operators)
    readers = [number for number, each in enumerate(operators) if _saved(each, dropped)]
    ran = [number for number, each in enumerate(operators) if each in again]
    first = max(readers[-1], ran[-1])
    kernels: tuple[Kernel, ...] = tuple(k for number in ran for k in operators[number].forward)
    found: list[Operator] = []
    live: set[str] = set()
    for number, each in enumerate(operators):
        live |= _saved(each, dropped)
        held = sum(dropped[name] for name in live) if number <= first else 0
        found.append(
            replace(
                each,
                saves=tuple(tensor for tensor in each.saves if tensor.name not in dropped),
                backward_scratch=each.backward_scratch + held,
                backward=(*kernels, *each.backward) if number == first else each.backward,
            )
        )
    return tuple(found)


def _saved(operator: Operator, names: Collection[str]) -> set[str]:
    return {tensor.name for tensor in operator.saves if tensor.name in names}


def rerun(stretch: Stretch) -> Stretch:
    """Return a stretch that keeps its inputs alone, and runs again before its backward."""
    return replace(stretch, operators=recomputed(stretch.operators, stretch.operators))
