"""Common to both FSDPs: parameters wrapped by block or in the root, and updates of shards.

Functions named in comments are from `torch/distributed/fsdp` in torch 2.13.
"""

from collections.abc import Mapping

from zsim.model.model import BATCH, Model, Parameter
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.state import Holding, Reduced
from zsim.zero.step_skeleton import Step
from zsim_runtimes.host_checkpoints import CopiedCheckpoints


def groups(model: Model, *, apart: bool = False) -> list[list[Parameter]]:
    """Return the parameters of each wrapped module: one for every block, and the root.

    Blocks are the units that are checkpointed separately. The root has all other parameters, and
    the parameters that several units use. With `apart`, experts of a block are a separate group.
    """
    users: dict[str, list[int]] = {}
    for index, unit in enumerate(model.units):
        for parameter in unit.parameters:
            users.setdefault(parameter.name, []).append(index)

    def block_of(parameter: Parameter) -> int | None:
        first, *others = users[parameter.name]
        return first if not others and model.units[first].checkpoint else None

    # An outer call manages the parameters that no inner call does: fully_shard
    # (_get_managed_states), and _init_param_handle_from_module (_get_orig_params) in FSDP1.
    found: dict[tuple[int | None, bool], list[Parameter]] = {}
    for parameter in model.parameters:
        key = block_of(parameter), apart and parameter.expert
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def two_parts(ranks: int) -> tuple[int, int]:
    """Return the divisors of gradients before and after their sum over `ranks`."""
    # DefaultState._get_gradient_predivide_factor (_comm_hooks/default_hooks.py) uses the first
    # power of two from the square root of `ranks` on; the other factor need not be whole. Here it
    # is the largest power of two up to there that divides `ranks`.
    before = 1
    while ranks % (2 * before) == 0 and ranks / before > before:
        before *= 2
    return before, ranks // before


class WrappedStep(Step):
    """A step of blocks that are wrapped separately, within a root.

    Attributes:
        order: first buckets of the blocks, in forward order.
        root: the root's bucket; None if all parameters are in blocks.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        buckets: Buckets,
        *,
        kept: Buckets | None = None,
        tier: MemoryTier = MemoryTier.DEVICE,
        writer: ScheduleWriter | None = None,
    ) -> None:
        # The sharded parameters are in their original dtype, which the optimizer updates, and are
        # cast as they are gathered: FlatParamHandle._use_low_precision_shard (_flat_param.py),
        # FSDPParam.all_gather_inputs (_fsdp_param.py).
        holding = Holding(
            parameter=strategy.train.precision.optimizer,
            parameter_sharded=True,
            frozen=strategy.train.precision.compute,
            parameter_tier=tier,
            optimizer_tier=tier,
        )
        super().__init__(model, strategy, buckets, holding, kept=kept, writer=writer)
        if strategy.checkpoint_tier is MemoryTier.HOST:  # offload_wrapper
            self.passes.checkpoints = CopiedCheckpoints(
                self.writer, model, strategy, visits=self.visits
            )
        blocks = [self.groups_of(unit) for unit in range(len(model.units))]
        self.order = [block[0] for block in blocks if block]
        inside = {number for block in blocks for number in block}
        roots = (bucket.index for bucket in buckets.all if bucket.index not in inside)
        self.root = next(roots, None)

    def block(self, unit: int) -> int | None:
        """Return the first bucket of a block; None if the unit belongs to the root."""
        return next(iter(self.groups_of(unit)), None)

    def groups_of(self, unit: int) -> tuple[int, ...]:
        """Return the buckets of the block that a unit is; empty if it belongs to the root."""
        if not self.model.units[unit].checkpoint:
            return ()
        own = (run.bucket for run in self.buckets.runs[unit])
        return tuple(number for number in own if self.buckets.all[number].units == (unit,))

    def has_input_gradient(self, unit: int) -> bool:
        """Return True if autograd computes a gradient of an input of the unit."""
        segments = self.model.units[unit].segments
        own = {value.name for segment in segments for value in segment.outputs}
        given = {name for segment in segments for name in segment.inputs} - own - {BATCH}
        return any(self.model.values[name].requires_gradient for name in given)

    def enter_root(self) -> None:
        """Write the following operations as part of the root."""
        self.writer.prefix = f"{self.writer.prefix}/root"

    def update_shards(self, reduced: Mapping[int, Reduced]) -> None:
        """Update every trained shard with PyTorch's optimizer, on the compute stream."""
        # clip_grad_norm_ and the optimizer wait for all gradients: _post_backward_final_callback,
        # FSDPParamGroup.finalize_backward.
        after = tuple(item.operation for item in reduced.values())
        self.update(reduced, after=after, stream=COMPUTE)
