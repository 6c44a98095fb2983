"""Parts of a flat tensor with different optimizer rules, set by parameter groups.

If a flat tensor holds parameters of several groups, a rank updates its part of each parameter. FSDP
with `use_orig_params=True` (`_flat_param.py`, `_use_sharded_views`) does so, FSDP2 with a sharded
tensor for each parameter, Megatron-LM (`distrib_optimizer.py`,
`_build_model_gbuf_param_range_map`), and nanotron with the groups of
`get_custom_weight_decay_for_named_parameters`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from zsim.model.model import Parameter
from zsim.schedule.layout import Layout
from zsim.schedule.operation import View
from zsim.schedule.schedule import Buffer
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledPart:
    """Elements [start, start + size) of a whole flat tensor that one rule updates."""

    rule: Optimizer
    start: int
    size: int

    def part(self, held: Buffer, view: View, layout: Layout) -> View:
        """Return the elements of this part in `view`: a whole buffer, or the rank's shard of it."""
        found = replace(view, start=self.start, size=self.size, axis=None)
        if held.shard is not None:
            return replace(found, layout=layout.name)
        if view.axis is not None:
            return replace(found, layout=layout.name, origin=self.start)
        return found


def by_rule(parameters: Sequence[Parameter], strategy: Strategy) -> list[list[Parameter]]:
    """Return parameters grouped by rule: the default optimizer's first, then by group in order."""
    rules = dict.fromkeys(
        (strategy.train.optimizer, *(group.rule for group in strategy.train.groups))
    )
    found: dict[Optimizer, list[Parameter]] = {rule: [] for rule in rules}
    for parameter in parameters:
        found[strategy.rule_of(parameter.name)].append(parameter)
    return [each for each in found.values() if each]


def ruled(layout: Layout, strategy: Strategy) -> list[RuledPart]:
    """Return the parts of a flat tensor: whole parameters with the padding after them."""
    starts: list[tuple[int, Optimizer]] = []
    for piece in layout.pieces if strategy.train.groups else ():
        rule = strategy.rule_of(piece.parameter)
        if piece.size and (not starts or starts[-1][1] != rule):
            starts.append((piece.start if starts else 0, rule))
    starts = starts or [(0, strategy.train.optimizer)]
    ends = [*(start for start, _ in starts[1:]), layout.elements]
    return [
        RuledPart(rule=rule, start=start, size=end - start)
        for (start, rule), end in zip(starts, ends, strict=True)
    ]
