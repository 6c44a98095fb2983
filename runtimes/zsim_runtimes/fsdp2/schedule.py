"""PyTorch's FSDP2: `fully_shard` on every block and on the root, which has the other parameters.

In forward, nothing limits how far ahead gathers are: the host runs ahead, and a gathered tensor is
kept until the next group is copied out. In backward, each group gathers the one before it. The last
block is freed and gathered again. A block whose inputs have no gradient is reduced at the very end,
after the root.

With expert ranks, a block has two groups: its experts are sharded over the ranks that hold the same
ones, all other parameters over the data axis. Forward gathers the first group, then experts;
backward reduces them in the reverse order. They have different communicators and the same streams,
on which NCCL runs collectives that are not asynchronous. Gathers are issued ahead explicitly, and
no reduction divides: the loss is divided by all tokens (`apply_fsdp_to_decoder` of torchtitan,
torchtitan/distributed/fsdp.py in August 2026, b5bcd76c).

A group gathers its frozen parameters with the others, and reduces only existing gradients. A block
whose outputs have no gradient has no backward, but the block after it gathers it nevertheless; the
result is dropped at the end.

Functions named in comments are from `torch/distributed/fsdp/_fully_shard` in torch 2.13, of
`FSDPParamGroup` in `_fsdp_param_group.py` unless another class is named.
"""

from collections.abc import Sequence

from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.operation import Edge
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Schedule
from zsim.schedule.schedule_writer import CPU, ScheduleWriter
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import need_single_calls
from zsim.zero.bucket import Bucket, Buckets, bucket_of, numbered
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.fsdp2.gather import ALL_GATHER, COPY_IN, GatheredPart, GroupGathers
from zsim_runtimes.fsdp2.options import FSDP2, Sync
from zsim_runtimes.fsdp2.placement import of_experts, padded_rows, shard_axis
from zsim_runtimes.fsdp2.reduce import ALL_REDUCE, REDUCE_SCATTER, GroupReductions
from zsim_runtimes.fsdp2.scales import WeightScales
from zsim_runtimes.fsdp2.volume import VOLUME
from zsim_runtimes.host_update import BlockingHostStep
from zsim_runtimes.wrapping import WrappedStep, groups


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of FSDP2 training `model`.

    Raises:
        ModelError: the model was built for other parallel degrees, or a checkpoint cannot be
            partitioned.
    """
    need_single_calls(model, "FSDP2")
    buckets = numbered_groups(model, groups(model, apart=strategy.has_expert_order), strategy)
    step = FSDP2Step(model, strategy, buckets, kept=shards(model, buckets, strategy))
    step.write()
    streams: tuple[str, ...] = (COMPUTE, COPY_IN, ALL_GATHER, REDUCE_SCATTER)
    if strategy.parallel.replicate > 1:
        streams = (*streams, ALL_REDUCE)
    if step.options.on_host:
        streams = (*streams, CPU)
    layouts = (*buckets.layouts, *step.kept.layouts, *step.gathers.layouts)
    return step.schedule(
        "FSDP2",
        VOLUME,
        streams=streams,
        layouts=tuple(dict.fromkeys((*layouts, *step.reductions.layouts))),
    )


def numbered_groups(
    model: Model, members: Sequence[Sequence[Parameter]], strategy: Strategy, name: str = "bucket"
) -> Buckets:
    """Return the buckets of groups of parameters; experts are sharded over their own ranks."""
    ranks, placement = strategy.parallel.data, strategy.options(FSDP2).shard_placement_fn
    return numbered(
        model,
        members,
        place=padded_rows(ranks, placement),
        ranks=ranks,
        name=name,
        experts=of_experts(strategy, placement),
    )


def shards(model: Model, groups: Buckets, strategy: Strategy) -> Buckets:
    """Return the persistent buckets of each group: its trained and its frozen parameters.

    Both have the number of the group. They are separate, because the optimizer has states only of
    the trained ones, and frozen ones can be loaded in the compute dtype.
    """
    # _init_mp_dtypes: only trained parameters need a common original dtype
    members = {each.name: each for each in model.parameters}
    found: list[Bucket] = []
    for group in groups.all:
        own = [members[piece.parameter] for piece in group.layout.pieces]
        kinds = [[each for each in own if each.frozen is frozen] for frozen in (False, True)]
        if not all(kinds):
            found.append(group)
            continue
        for kind, name in zip(kinds, ("trained_bucket", "bucket"), strict=True):
            found.append(_of_group(model, group, kind, strategy, name=name))
    return Buckets(all=tuple(found), runs=())


def gathered_parts(
    model: Model, groups: Buckets, strategy: Strategy
) -> list[tuple[GatheredPart, ...]]:
    """Return the parts of each group: parameters gathered in float8, and in the compute dtype."""
    compute = strategy.train.precision.compute
    members = {each.name: each for each in model.parameters}
    found: list[tuple[GatheredPart, ...]] = []
    for group in groups.all:
        own = [members[piece.parameter] for piece in group.layout.pieces]
        narrow, wide = ([each for each in own if each.float8 is it] for it in (True, False))
        if not (narrow and wide):
            dtype = DType.FP8 if narrow else compute
            found.append((GatheredPart(bucket=group, dtype=dtype),))
            continue
        stage = group.name[: group.name.rfind("/") + 1]  # of a pipeline
        parts = [
            GatheredPart(bucket=_of_group(model, group, kind, strategy, name=name), dtype=dtype)
            for kind, name, dtype in (
                (narrow, f"{stage}narrow_bucket", DType.FP8),
                (wide, f"{stage}wide_bucket", compute),
            )
        ]
        found.append(tuple(parts))
    return found


def _of_group(
    model: Model,
    group: Bucket,
    members: Sequence[Parameter],
    strategy: Strategy,
    *,
    name: str,
) -> Bucket:
    """Return a bucket of some parameters of a group, with its number."""
    over = shard_axis(group, strategy)
    packed = padded_rows(over.ranks, strategy.options(FSDP2).shard_placement_fn)(members)
    return bucket_of(model, group.index, members, packed, over=over, units=group.units, name=name)


class FSDP2Step(WrappedStep):
    """Forward and backward of every micro-batch, then the update.

    Attributes:
        last_unit: the unit that ends the forward of the root.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        buckets: Buckets,
        *,
        kept: Buckets,
        writer: ScheduleWriter | None = None,
        collects: bool | None = None,
        copies_on: str = COPY_IN,
        model_parts: Sequence[range] = (),
    ) -> None:
        self.options = strategy.options(FSDP2)
        # FSDPParam._init_sharded_param: `offload_to_cpu`; PyTorch's optimizer creates its states on
        # the device of the parameters
        tier = MemoryTier.HOST if self.options.on_host else MemoryTier.DEVICE
        super().__init__(model, strategy, buckets, kept=kept, tier=tier, writer=writer)
        if self.options.on_host:
            self.optimizer_step = BlockingHostStep
        if collects is None:
            several = strategy.train.gradient_accumulation_steps > 1
            collects = several and self.options.gradient_sync is Sync.LAST
        parts = gathered_parts(model, buckets, strategy)
        self.scales = WeightScales(self, parts, model_parts or [range(len(model.units))])
        self.gathers = GroupGathers(
            self, self.options, parts=parts, ready=self.scales.ready, copies_on=copies_on
        )
        self.passes.elsewhere = self.gathers.places
        self.reductions = GroupReductions(self, self.options, collects=collects)
        self.last_unit = len(model.units) - 1
        self.ahead = self.options.gathered_ahead(expert_order=strategy.has_expert_order)
        self._position = 0
        self._ahead: list[int] = []
        self._late: list[int] = []

    def held(self, bucket: int, visit: UnitVisit) -> str:
        """Return the buffer of a bucket's whole parameters."""
        del visit
        return self.gathers.whole(self.buckets.all[bucket])

    def begin_forward(self) -> None:
        """Gather the root, which is kept until its backward unless it is freed after forward."""
        self._position = 0
        if self.root is not None:
            self.enter_root()
            # FSDPState._lazy_init: the root has reshard_after_forward=False by default
            self.gathers.gather(self.root)
            self.gathers.copy_out(self.root, forward=True)

    def forward(self, visit: UnitVisit) -> None:
        """Gather a block, run it, and reshard it."""
        block, gathers = self.groups_of(visit.unit), self.gathers
        for group in block:
            gathers.gather(group)  # pre_forward: unshard, wait_for_unshard
            gathers.copy_out(group, forward=True)
        if block:
            self._position += 1
            # FSDPState._pre_forward: the modules of set_modules_to_forward_prefetch, in order
            for ahead in self.order[self._position : self._position + self.ahead]:
                for group in self.wrapped_with(ahead):
                    gathers.gather(group)
        self.passes.checkpoints.enter(visit)  # OffloadWrapper.forward
        self.passes.forward(visit, ())
        for group in block:
            gathers.after_forward(group)  # post_forward
        if visit.unit == self.last_unit:
            gathers.end_forward()  # FSDPState._post_forward of the root
            if self.root is not None and self.options.reshard_root_after_forward:
                gathers.reshard(self.root)  # its FSDPParamGroup.post_forward

    def begin_backward(self) -> None:
        """Enter the backward of the root, which gathers the block that ran last."""
        self._ahead = [*self.order]
        self._late = []
        if self.root is None:
            return
        self.enter_root()
        if self.options.reshard_root_after_forward:  # pre_backward: unshard, wait_for_unshard
            self.gathers.gather(self.root)
            self.gathers.copy_out(self.root, forward=False)
        self._gather_before()  # pre_backward, _backward_prefetch

    def backward(self, visit: UnitVisit) -> None:
        """Gather a block and the one before it, run it backward, and reduce it."""
        block = self.groups_of(visit.unit)
        for group in block:
            self.gathers.gather(group)  # pre_backward: no gather if it was done ahead
            self.gathers.copy_out(group, forward=False)
        if block:
            # A block without a gradient of its outputs has no hook on them
            # (FSDPState._register_pre_backward_hook) and is skipped.
            while self._ahead.pop() != block[0]:
                pass
            self._gather_before()
        self.passes.checkpoints.enter(visit)  # _CheckpointFrame's recompute_fn reads the input
        self.passes.backward(visit, ())
        self.reductions.collect(visit.unit)
        if not block:
            return
        # _register_post_backward_hook: on inputs that need a gradient, for each group. If none
        # does, the callback at the end of backward replaces it.
        if self.has_input_gradient(visit.unit):
            for group in reversed(block):
                self.after_backward(group)
        else:
            self._late.append(block[0])

    def _gather_before(self) -> None:
        """Gather the block before, its last group first."""
        # _backward_prefetch: the entries before its own in post_forward_order; FSDPState
        # _pre_backward: the modules of set_modules_to_backward_prefetch
        for group in reversed(self.wrapped_with(self._ahead[-1]) if self._ahead else ()):
            self.gathers.gather(group)

    def wrapped_with(self, block: int) -> tuple[int, ...]:
        """Return the buckets of the block whose first bucket is `block`, or of the root."""
        units = self.buckets.all[block].units
        return (len(units) == 1 and self.groups_of(units[0])) or (block,)

    def end_backward(self) -> None:
        """Reduce the root, and then blocks whose inputs or outputs have no gradient."""
        done = {self.block(visit.unit) for visit in self.visits if visit.backward}
        late = sorted([*self._late, *(block for block in self.order if block not in done)])
        waits: tuple[Edge, ...] = ()
        # FSDPState._root_post_backward_final_callback: all states in module order
        for block in [*([] if self.root is None else [self.root]), *late]:
            for bucket in reversed(self.wrapped_with(block)):
                self.after_backward(bucket, waits)
                waits = self.reductions.finished
        self.reductions.end_backward()

    def write_setup(self) -> None:
        """Compute the scales of the first step for weights that are gathered in float8."""
        self.scales.write("setup")

    def end(self) -> None:
        """Update every trained shard, and compute the scales of the next step."""
        self.update_shards(self.reductions.reduced)
        self.scales.write("step/update")

    def after_backward(self, bucket: int, after: tuple[Edge, ...] = ()) -> None:
        """Free a group whose backward is done, and reduce its gradients."""
        last = self.is_last
        self.gathers.after_backward(bucket, last=last)  # post_backward: reshard, then reduce
        self.reductions.reduce(bucket, after, last=last)
