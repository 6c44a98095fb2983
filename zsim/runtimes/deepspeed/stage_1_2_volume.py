"""Parameters and gradients in DeepSpeed's stages 1 and 2: a gather a step, and all-reduced buckets.

The flat tensor of all parameters that are trained by one rule is padded to a multiple of twice the
ranks, and gathered. Gradients are all-reduced whole, in the order in which backward completes them,
at most `reduce_bucket_size` elements at a time: once a step in stage 1, in every micro-batch in
stage 2.
"""

from zsim.closed_form.data_volume import DataVolume, all_reduces, closed_before
from zsim.model.model import Model, Parameter
from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def grouped(model: Model, strategy: Strategy) -> list[list[Parameter]]:
    """Parameters by rule: the optimizer's, then those of each group."""
    rules = [strategy.train.optimizer, *(group.rule for group in strategy.train.groups)]
    found = [
        [
            each
            for each in model.parameters
            if not each.frozen and strategy.rule_of(each.name) == rule
        ]
        for number, rule in enumerate(rules)
        if rule not in rules[:number]
    ]
    return [parameters for parameters in found if parameters]


def padded_elements(model: Model, strategy: Strategy) -> int:
    """Elements of all flat tensors."""
    multiple = 2 * strategy.parallel.data
    sizes = [sum(each.elements for each in own) for own in grouped(model, strategy)]
    return sum(-(-size // multiple) * multiple for size in sizes)


def completed(model: Model) -> list[int]:
    """Elements of each trained parameter in the order in which backward completes its gradient."""
    order: dict[str, int] = {}
    for unit in reversed(model.units):
        for parameter in reversed(unit.parameters):
            order.pop(parameter.name, None)  # another unit adds to it
            if not parameter.frozen:
                order[parameter.name] = parameter.elements
    return list(order.values())


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume over the data axis."""
    options = strategy.options(DeepSpeed)
    ranks = strategy.parallel.data
    sizes = completed(model)
    if strategy.zero.stage == 1 and not options.overlap_comm:
        groups = grouped(model, strategy)
        sizes = [parameter.elements for group in groups for parameter in reversed(group)]
    limit = options.reduce_bucket_size
    # A gradient that is too large is reduced alone, after what stands in the bucket.
    large = [size for size in sizes if size > limit]
    buckets: list[int] = [*large]
    start = 0
    for end in (*(at for at, size in enumerate(sizes) if size > limit), len(sizes)):
        buckets += closed_before(sizes[start:end], limit)
        start = end + 1
    compute = strategy.train.precision.compute
    wire = (options.communication_data_type or compute).size_bytes
    times = strategy.train.gradient_accumulation_steps if strategy.zero.stage == 2 else 1
    gathered = padded_elements(model, strategy) // ranks * (ranks - 1) * compute.size_bytes
    return [
        WireBytes(group="data", collective="all_gather", bytes=gathered),
        *all_reduces("data", buckets * times, ranks=ranks, size_bytes=wire),
    ]


VOLUME = DataVolume(data=data, norms=lambda model, strategy: len(grouped(model, strategy)))
