"""The parameters of each bucket of DDP's reducer, in the order in which buckets are reduced.

Functions named in comments are from `torch/csrc/distributed/c10d/reducer.cpp` and
`torch/nn/parallel/distributed.py` in torch 2.13.
"""

from collections.abc import Sequence

from zsim.model.model import Model, Parameter
from zsim_runtimes.ddp.options import DDP


def assigned(
    parameters: Sequence[Parameter], limits: tuple[int, int], size_bytes: int
) -> list[list[Parameter]]:
    """Return buckets of `parameters` in order; a bucket is closed when it reaches its limit.

    `limits` are the bytes of the first bucket and of the others. An element has `size_bytes`.
    """
    # compute_bucket_assignment_by_size
    found: list[list[Parameter]] = []
    open_bucket: list[Parameter] = []
    filled = 0
    for parameter in parameters:
        open_bucket.append(parameter)
        filled += parameter.elements * size_bytes
        if filled >= limits[min(len(found), 1)]:
            found.append(open_bucket)
            open_bucket, filled = [], 0
    return [*found, open_bucket] if open_bucket else found


def gradient_ready(model: Model) -> list[Parameter]:
    """Return trained parameters in the order in which backward completes their gradients."""
    order: dict[str, Parameter] = {}
    for unit in reversed(model.units):
        for parameter in reversed(unit.parameters):
            order.pop(parameter.name, None)  # another unit adds to it
            order[parameter.name] = parameter
    return [each for each in order.values() if not each.frozen]


def buckets_of(model: Model, options: DDP, size_bytes: int) -> list[list[Parameter]]:
    """Return the buckets from the second iteration on, in the order of their reduction."""
    # Reducer::rebuild_buckets: in the order of the first backward, unless
    # should_rebuild_buckets is false
    if not options.finds_unused:
        return assigned(gradient_ready(model), options.limits, size_bytes)
    # _ddp_init_helper: assigned in the order of the model, and reversed
    trained = [each for each in model.parameters if not each.frozen]
    return assigned(trained, options.limits, size_bytes)[::-1]
