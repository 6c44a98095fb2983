"""PyTorch's first FSDP: one flat parameter for every block and one for the root.

A flat parameter is gathered on the unshard stream and used on the compute stream. Its memory, and
that of gradients, returns when the streams that used it are done. To limit gathers in flight, the
host waits until all but the latest free have taken effect.

Functions named in comments are from `torch/distributed/fsdp/_runtime_utils.py` in torch 2.13.
"""

from collections import deque

from zsim.model.model import Model
from zsim.schedule.operation import Edge, FreeMode, Previous
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import need_single_calls
from zsim.zero.bucket import Bucket, Buckets, numbered, one_after_the_other
from zsim.zero.gather import AfterUpdate
from zsim.zero.names import DATA
from zsim.zero.step_skeleton import StepPart
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.fsdp1.options import FSDP1, BackwardPrefetch, ShardingStrategy
from zsim_runtimes.fsdp1.reduce import ALL_REDUCE, POST_BACKWARD, FlatReductions
from zsim_runtimes.fsdp1.volume import VOLUME
from zsim_runtimes.late_frees import worst_case
from zsim_runtimes.wrapping import WrappedStep, groups

# _init_streams: one stream for each of these, and the current one for compute.
PRE_UNSHARD = "pre_unshard"
UNSHARD = "unshard"

SETTLED = 4
"""Number of steps after which steps repeat: one step waits for the unfinished work of the last."""
GATHERS_IN_FLIGHT = 2  # _FreeEventQueue (_limiter_utils.py), _max_num_inflight_all_gathers


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of FSDP training `model`.

    Raises:
        ModelError: the model was built for other parallel degrees, or a checkpoint cannot be
            partitioned.
    """
    need_single_calls(model, "FSDP1")
    # FlatParamHandle._get_shard (_flat_param.py) pads the flat parameter at its end.
    place = one_after_the_other(strategy.parallel.data)
    buckets = numbered(model, groups(model), place=place, ranks=strategy.parallel.data)
    step = _written(model, strategy, buckets, left=())
    for _ in range(SETTLED - 1):
        if step.gathers.unfinished == step.gathers.begun_with:
            break
        step = _written(model, strategy, buckets, left=step.gathers.unfinished)
    streams = (COMPUTE, PRE_UNSHARD, UNSHARD, POST_BACKWARD)
    return step.schedule(
        "FSDP1",
        VOLUME,
        streams=streams if strategy.parallel.replicate == 1 else (*streams, ALL_REDUCE),
        peak_of=worst_case if step.options.limit_all_gathers else _nothing,
    )


def _written(
    model: Model, strategy: Strategy, buckets: Buckets, left: tuple[str, ...]
) -> "FSDP1Step":
    step = FSDP1Step(model, strategy, buckets, left=left)
    step.write()
    return step


def _nothing(_program: Program) -> None:
    """Promise no peak: without a limit, the host may run ahead without bound."""


class FSDP1Step(WrappedStep):
    """A step that starts with the operations that the previous step `left` unfinished."""

    def __init__(
        self, model: Model, strategy: Strategy, buckets: Buckets, *, left: tuple[str, ...]
    ) -> None:
        super().__init__(model, strategy, buckets)
        self.options = strategy.options(FSDP1)
        self.gathers = FlatGathers(self, self.options, left)
        self.reductions = FlatReductions(self, self.options)
        self._frees = self.options.sharding_strategy is ShardingStrategy.FULL_SHARD
        self._position = {block: position for position, block in enumerate(self.order)}
        self._ahead = deque(self.order)
        self._late: deque[int] = deque()
        self._after: tuple[Edge, ...] = ()

    def held(self, bucket: int, visit: UnitVisit) -> str:
        """Return the buffer of a bucket's whole flat parameter."""
        del visit
        return self.gathers.whole(self.buckets.all[bucket])

    def begin_forward(self) -> None:
        """Gather the root, which is kept until its backward."""
        self._ahead = deque(self.order)
        self._after = self.reductions.finished
        if self.root is not None:
            self.enter_root()
            self._after += self.gathers.need(self.root)  # _pre_forward_unshard
            self._prefetch_forward()

    def forward(self, visit: UnitVisit) -> None:
        """Gather a block, run it, and free it."""
        block = self.block(visit.unit)
        if block is not None:
            self._after += self.gathers.need(block)  # _pre_forward_unshard
            self._ahead.popleft()
            self._prefetch_forward()
        self.passes.checkpoints.enter(visit, self._after)  # OffloadWrapper.forward
        self.gathers.used(self.passes.forward(visit, self._after))
        self._after = ()
        # _post_forward_reshard: strategies in RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES, not the root
        if block is not None and self._frees:
            self.gathers.free(block)

    def _prefetch_forward(self) -> None:
        # _prefetch_handle, after the compute stream's wait: this block does not wait for this
        # gather.
        if self.options.forward_prefetch and self._ahead:
            self.gathers.gather(self._ahead[0])

    def begin_backward(self) -> None:
        """Enter the backward of the root, which is whole."""
        self._ahead = deque(self.order)
        if self.root is not None:
            self.enter_root()
            # _pre_backward_hook unshards a whole parameter: no gather, but the rate limiter in
            # _unshard still takes an event.
            self.gathers.limit(self.root)
            self._prefetch_backward(BackwardPrefetch.PRE)

    def backward(self, visit: UnitVisit) -> None:
        """Gather a block again, run it backward, and reduce complete gradients."""
        block = self.block(visit.unit)
        after: tuple[Edge, ...] = ()
        if block is not None:
            after = self.gathers.need(block)  # _pre_backward_hook
            self._ahead.pop()
            self._prefetch_backward(BackwardPrefetch.PRE)
        self.passes.checkpoints.enter(visit, after)
        self.gathers.used(self.passes.backward(visit, after))
        self.reductions.collect(visit.unit)
        if block is not None:
            self._late.append(block)
            while len(self._late) > self._lag(block):
                self._after_backward(self._late.popleft())

    def _lag(self, block: int) -> int:
        """Return the number of blocks whose gradients autograd completes one block late.

        Autograd runs the latest nodes of the graph first. Views of a parameter gathered ahead are
        created (FlatParamHandle._use_unsharded_views) before the previous block runs forward. In
        backward they come after that block.
        """
        first = self.root is None and block == self.order[0]
        return 1 if self.options.forward_prefetch and not first else 0

    def _prefetch_backward(self, when: BackwardPrefetch, position: int = -1) -> None:
        # _get_handle_to_prefetch: the previous block in forward (get_handle_to_backward_prefetch)
        if self.options.backward_prefetch is when and self._ahead:
            self.gathers.gather(self._ahead[position])

    def end_backward(self) -> None:
        """Reduce the gradients that autograd left until the end, the root last."""
        self._ahead.clear()
        while self._late:
            self._after_backward(self._late.popleft())
        if self.root is not None:
            self._after_backward(self.root)

    def end(self) -> None:
        """Update every trained shard."""
        self.update_shards(self.reductions.reduced)

    def _after_backward(self, bucket: int) -> None:
        """Free whole parameters and reduce their gradients."""
        syncs = self.is_last or not self.options.no_sync
        # _should_free_in_backward: without a reduction SHARD_GRAD_OP keeps them
        if syncs or self._frees:
            self.gathers.free(bucket)
        # _post_backward_reshard: after the free, gathers the previous block unless it is whole
        if 0 < self._position.get(bucket, 0) <= len(self._ahead):
            self._prefetch_backward(BackwardPrefetch.POST, self._position[bucket] - 1)
        self.reductions.take(self.buckets.all[bucket])
        if syncs:  # _post_backward_hook returns before the reduction otherwise
            self.reductions.reduce(self.buckets.all[bucket])


class FlatGathers(StepPart):
    """Flat parameters that are whole or in flight, and the limit of gathers."""

    def __init__(self, step: WrappedStep, options: FSDP1, left: tuple[str, ...]) -> None:
        super().__init__(step)
        self.options = options
        self._casts = step.strategy.train.precision.has_master
        self.begun_with = left
        self._prefetched: set[int] = set()
        self._freed: deque[Edge] = deque(Previous(operation) for operation in left)
        self._latest = ""
        self._gathered = ""
        # _root_pre_forward (_wait_for_computation_stream): both streams of gathers wait once.
        self._after_update = AfterUpdate(f"step/update/{self.buckets.all[-1].name}/update")

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Frees that the host has not waited for, by the operations they wait for."""
        return tuple(edge.operation if isinstance(edge, Previous) else edge for edge in self._freed)

    def whole(self, bucket: Bucket) -> str:
        """Return the buffer of the bucket's whole flat parameter."""
        return bucket.buffer(self.writer, "whole", self.compute, home=UNSHARD)

    def need(self, number: int) -> tuple[Edge, ...]:
        """Gather unless already gathered ahead; return the edges that compute waits for."""
        if number not in self._prefetched:
            self._unshard(number)
        self._prefetched.discard(number)
        # current_stream.wait_stream(unshard_stream): for all gathers so far
        return (self._gathered,)

    def gather(self, number: int) -> None:
        """Gather ahead, unless the parameter is whole or being gathered."""
        if number in self._prefetched or self.whole(self.buckets.all[number]) in self.writer.alive:
            return
        self._unshard(number)
        self._prefetched.add(number)

    def used(self, operation: str) -> None:
        """Record the last operation on the compute stream that may have read parameters."""
        self._latest = operation

    def limit(self, number: int) -> None:
        """Make the host wait, before bucket `number`, for the oldest of too many frees."""
        # _unshard waits for the event of _FreeEventQueue.dequeue_if_needed in _limiter_utils.py
        if self.options.limit_all_gathers and len(self._freed) >= GATHERS_IN_FLIGHT:
            self.writer.host_wait(f"limit/bucket{number}", self._freed.popleft())

    def _unshard(self, number: int) -> None:
        writer, bucket = self.writer, self.buckets.all[number]
        whole = self.whole(bucket)
        if whole in writer.alive:
            self.limit(number)
            return
        source, after = self.states[number].parameter, self._after_update.take()
        # _unshard: the cast comes before the rate limiter, the memory of the gather after it
        if self._casts:
            source, after = self._cast(bucket, after)
        self.limit(number)
        writer.allocate(whole)
        path = f"gather/{bucket.name}"
        self._gathered = writer.all_gather(path, DATA, source, whole, stream=UNSHARD, after=after)
        if self._casts:
            # FlatParamHandle._free_low_precision_sharded_param (_flat_param.py) records the stream
            writer.free(source, uses=(self._gathered,), mode=FreeMode.DEFERRED)

    def _cast(self, bucket: Bucket, after: tuple[Edge, ...]) -> tuple[str, tuple[Edge, ...]]:
        """Cast the shard to the dtype of the gather; return the buffer and edges to the cast."""
        # FlatParamHandle._use_low_precision_shard (_flat_param.py), on the pre-unshard stream
        cast = bucket.shard_buffer(self.writer, "cast_shard", self.compute, home=PRE_UNSHARD)
        self.writer.allocate(cast)
        shard = self.states[bucket.index].parameter
        path = f"cast/{bucket.name}"
        return cast, (self.writer.copy(path, shard, cast, stream=PRE_UNSHARD, after=after),)

    def free(self, number: int) -> None:
        """Free the whole parameter once the compute stream is done with it."""
        # FlatParamHandle._free_unsharded_flat_param (_flat_param.py) records the compute stream;
        # _reshard queues an event of it for the rate limiter.
        whole = self.whole(self.buckets.all[number])
        self.writer.free(whole, uses=(self._latest,), mode=FreeMode.DEFERRED)
        if self.options.limit_all_gathers:
            self._freed.append(self._latest)
