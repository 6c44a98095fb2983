"""Gradients in FSDP2: collected, copied in as rows of each rank, reduced, and cast to shards.

A training loop divides the loss by the number of micro-batches; here the copy does so. With expert
ranks, it divides by the data ranks as well, and reductions are sums.

Functions named in comments are from `torch/distributed/fsdp/_fully_shard` in torch 2.13;
`foreach_reduce` is in `_fsdp_collectives.py`, `post_backward` in `_fsdp_param_group.py`.
"""

from collections import Counter

from msgspec.structs import replace

from zsim.dtype import DType
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Edge, Reduction, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import CPU, HOST_POOL
from zsim.zero.bucket import Bucket
from zsim.zero.names import REPLICATE
from zsim.zero.state import Reduced
from zsim.zero.step_skeleton import StepPart
from zsim.zero.token_copies import shared_views, sum_over_tokens
from zsim_runtimes.fsdp2.options import FSDP2, Sync
from zsim_runtimes.fsdp2.placement import shard_axis, sharded_by_second
from zsim_runtimes.reduced_gradients import divide, set_or_add
from zsim_runtimes.wrapping import WrappedStep, two_parts

# FSDPCommContext.lazy_init
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"

Sources = list[tuple[str, set[str]]]
"""Buffers of gradients, with the names of the parameters in each."""
Copies = list[tuple[str, View]]
"""Names and gradients of parameters that every tensor rank holds."""


class GroupReductions(StepPart):
    """Takes the gradients of each unit's backward and reduces them bucket by bucket.

    With `collects`, whole gradients of several backwards are added up first.
    """

    def __init__(self, step: WrappedStep, options: FSDP2, *, collects: bool) -> None:
        super().__init__(step)
        self.options = options
        self.reduced: dict[int, Reduced] = {}
        self._trained = {bucket.index: bucket for bucket in step.kept.trained}
        self.layouts: tuple[Layout, ...] = ()
        if collects:
            self.layouts = tuple(_unpadded(bucket) for bucket in step.kept.trained)
        self._wire = options.reduce_dtype or step.strategy.train.precision.compute
        # _get_gradient_divide_factors (_fsdp_collectives.py): the collective averages fp32 and
        # bf16, unless there is one rank; fp16 is divided before and after a sum.
        mean = self._wire in (DType.FP32, DType.BF16)
        ranks, sums = step.strategy.replicas, step.strategy.has_expert_order
        self._before, self._after = (1, 1) if mean or sums else two_parts(ranks)
        averages = self._before == self._after == 1 and ranks > 1 and not sums
        self._reduction = Reduction.AVERAGE if averages else Reduction.SUM
        # disable_fsdp_gradient_division of torchtitan: factors of 1
        self._divisor = step.strategy.train.gradient_accumulation_steps * (ranks if sums else 1)
        # post_backward: the last group of a module comes first
        self._first = set({each.units: each.index for each in self.buckets.all}.values())
        placement, strategy = options.shard_placement_fn, step.strategy
        sharded = [each for each in self.buckets.all if shard_axis(each, strategy).ranks > 1]
        turned = sharded_by_second(step.model, sharded, strategy, placement)
        self._by_second = {each.index: turns for each, turns in zip(sharded, turned, strict=True)}
        self._collected: dict[int, Sources] = {}
        self._copies: dict[int, Copies] = {}
        self._left: dict[tuple[int, int], str] = {}
        self._inputs: list[tuple[str, str]] = []
        self._held: list[tuple[str, tuple[str, ...]]] = []
        self._leaving: list[tuple[Bucket, str]] = []
        self.finished: tuple[str, ...] = ()

    def collect(self, unit: int) -> None:
        """Keep the gradients from backward of `unit` until its bucket is reduced."""
        for position, run in self.buckets.trained_runs(unit):
            names = {parameter.name for parameter in run.trained}
            source = self.passes.transient(unit, position)
            self._collected.setdefault(run.bucket, []).append((source, names))
            copies = shared_views(run, source, self.passes.tokens.shared)
            self._copies.setdefault(run.bucket, []).extend(copies)

    def reduce(self, number: int, after: tuple[Edge, ...] = (), *, last: bool) -> None:
        """Reduce the collected gradients, or add them up if a later micro-batch reduces them."""
        bucket = self._trained.get(number)
        if bucket is None:
            return
        # set_requires_gradient_sync(False): post_backward keeps whole gradients
        waits = self.options.gradient_sync is Sync.LAST and not last
        if waits or self._together(bucket) in self.writer.alive:
            self.add_up(number)
            if not waits:
                self.reduce_sum(number, after, last=last)
            return
        sources, copies = self._collected.pop(number), self._copies.pop(number)
        self._reduce(bucket, sources, copies, after, last=last)

    def add_up(self, number: int) -> None:
        """Add the collected gradients to whole gradients of earlier backwards."""
        bucket = self._trained.get(number)
        if bucket is None:
            return
        sources = self._collected.pop(number)
        del self._copies[number]
        self._add_up(bucket, self._together(bucket), sources)

    def collect_or_add(self, unit: int) -> None:
        """Keep the gradients from a second part of backward of `unit`, or add to earlier ones.

        If their dtype is that of the reduction, they are added to whole gradients at once.
        """
        # stage_backward_weight (torch/distributed/pipelining/_backward.py): weight.grad, which
        # to_accumulated_grad_if_needed leaves in place if it is in reduce_dtype
        if self._wire is self.compute:
            self.collect(unit)
            for number in {run.bucket for _, run in self.buckets.trained_runs(unit)}:
                if unit == self._last_trained(number):
                    self.add_up(number)
            return
        for position, run in self.buckets.trained_runs(unit):
            source, before = self.passes.transient(unit, position), self._left.get((unit, position))
            if before is None:
                names = {parameter.name for parameter in run.trained}
                self._left[unit, position] = source
                self._collected.setdefault(run.bucket, []).append((source, names))
                continue
            self.writer.copy(
                f"add/{before}/{source}",
                source,
                before,
                accumulate=True,
                launches=len(run.trained),
            )
            self.writer.free(source)

    def _last_trained(self, number: int) -> int:
        """Return the unit of a bucket whose second part runs last: they run in forward order."""
        units = self.buckets.all[number].units
        return max(unit for unit in units if any(self.buckets.trained_runs(unit)))

    def add_up_left(self, number: int) -> None:
        """Add gradients from second parts since the last call, if any, to whole gradients."""
        if number not in self._collected:
            return
        for unit in self.buckets.all[number].units:
            for position, run in self.buckets.trained_runs(unit):
                if run.bucket == number:
                    self._left.pop((unit, position), None)
        self._copies.setdefault(number, [])
        self.add_up(number)

    def reduce_sum(self, number: int, after: tuple[Edge, ...] = (), *, last: bool = True) -> None:
        """Reduce the whole gradients that were added up."""
        bucket = self._trained.get(number)
        if bucket is None:
            return
        together = self._together(bucket)
        sources = [(together, {piece.parameter for piece in bucket.layout.pieces})]
        copies = self._collected_copies(bucket, together)
        self._reduce(bucket, sources, copies, after, last=last)

    def _together(self, bucket: Bucket) -> str:
        return f"{bucket.name}/accumulated"

    def _reduce(
        self,
        bucket: Bucket,
        sources: Sources,
        copies: Copies,
        after: tuple[Edge, ...],
        *,
        last: bool,
    ) -> None:
        # FSDPParam.unsharded_grad_data: a partial DTensor is redistributed, each separately
        if sum_over_tokens(self.writer, copies, after=after):
            after = ()
        # post_backward: before another input, at most `reduce_scatter_max_input_buffers` - 1 are
        # alive
        most = self.options.reduce_scatter_max_input_buffers
        while bucket.index in self._first and len(self._inputs) >= most:
            self._free_input()
        self._reduce_scatter(bucket, *self._copy_in(bucket, sources, after), last=last)

    def _add_up(self, bucket: Bucket, target: str, sources: Sources) -> None:
        """Add up whole gradients of micro-batches, in the dtype of the reduction."""
        # to_accumulated_grad_if_needed and accumulate_unsharded_grad_if_needed in _fsdp_param.py
        writer, layout = self.writer, _unpadded(bucket)
        writer.buffer(target, layout.elements, self._wire, Kind.GRADIENT, layout=layout.name)
        first = target not in writer.alive
        if first:
            writer.allocate(target)
        self._gather_up(target, sources, adds=not first)

    def _collected_copies(self, bucket: Bucket, buffer: str) -> Copies:
        return [
            (piece.parameter, View(buffer=buffer, start=piece.start, size=piece.size))
            for piece in _unpadded(bucket).pieces
            if piece.parameter in self.passes.tokens.shared
        ]

    def _copy_in(
        self, bucket: Bucket, sources: Sources, after: tuple[Edge, ...]
    ) -> tuple[str, str]:
        """Return the input of a reduce-scatter, and the operation that completes it."""
        # foreach_reduce_scatter_copy_in (_fsdp_collectives.py), chunk_cat on the compute stream
        if turns := self._by_second.get(bucket.index, 0):
            sources = [
                (self._turned(source, after, launches=turns), names) for source, names in sources
            ]
            after = ()
        target = bucket.buffer(self.writer, "input_gradient", self._wire)
        self.writer.allocate(target)
        return target, self._gather_up(
            target, sources, adds=False, divisor=self._divisor, after=after
        )

    def _turned(self, source: str, after: tuple[Edge, ...], *, launches: int) -> str:
        """Copy gradients so that parts along the second dimension follow each other; free them."""
        # foreach_reduce: torch.cat of chunks, for each such parameter
        writer, own = self.writer, self.writer.buffers[source]
        name = writer.buffer(
            f"{source}/chunks", own.elements, own.dtype, Kind.GRADIENT, layout=own.layout
        )
        writer.allocate(name)
        writer.copy(f"chunk/{source}", source, name, launches=launches, after=after)
        writer.free(source)
        return name

    def _gather_up(
        self,
        target: str,
        sources: Sources,
        *,
        adds: bool,
        divisor: int = 1,
        after: tuple[Edge, ...] = (),
    ) -> str:
        """Copy or add the sources and free them; a parameter in several sources is summed."""
        writer, copied = self.writer, ""
        times = Counter(name for _, names in sources for name in names)
        if not adds and max(times.values()) > 1:
            writer.fill(f"zero/{target}", target, 0.0, after=after)
            adds, after = True, ()
        for source, _ in sources:
            copied = writer.copy(
                f"{'add' if adds else 'set'}/{target}/{source}",
                source,
                target,
                accumulate=adds,
                divisor=divisor,
                by_parameter=True,
                after=after,
            )
            after = ()
            writer.free(source)
        return copied

    def _reduce_scatter(self, bucket: Bucket, source: str, copied: str, *, last: bool) -> None:
        """Reduce the input on a separate stream, and add the result to the gradient shard."""
        # foreach_reduce
        writer, strategy, stream = self.writer, self.strategy, REDUCE_SCATTER
        # set_requires_all_reduce(False) leaves the all-reduce to the last micro-batch
        all_reduces = last or self.options.all_reduce is Sync.EVERY
        direct = (
            self._wire is strategy.train.precision.optimizer and bucket.index not in self.reduced
        )
        target = self._shard(bucket, "received", self._wire, stream)
        if direct and all_reduces and not self.options.on_host:
            target = self._shard(bucket, "gradient", self._wire, stream)
        writer.allocate(target)
        if self._before > 1:
            copied = divide(writer, source, self._before, stream=stream, after=(copied,))
        path, after = f"reduce/{bucket.name}", (copied,)
        axis, ranks = shard_axis(bucket, strategy)
        if ranks == 1:  # foreach_reduce, "world_size > 1" does not hold: a copy
            done = writer.copy(path, source, target, stream=stream, after=after)
        else:
            mean = self._reduction
            done = writer.reduce_scatter(
                path, axis, source, target, reduction=mean, stream=stream, after=after
            )
        self._inputs.append((source, done))
        if strategy.parallel.replicate > 1:
            if not all_reduces:
                # `partial_reduce_output`, on the reduce-scatter stream
                partial = self._shard(bucket, "partial", self._wire, stream)
                set_or_add(writer, target, partial, stream=stream)
                writer.free(target)
                return
            done, stream = self._all_reduce(bucket, target, done), ALL_REDUCE
        if self._after > 1:
            done = divide(writer, target, self._after, stream=stream, after=(done,))
        self._settle(bucket, target, stream, done)

    def _all_reduce(self, bucket: Bucket, target: str, done: str) -> str:
        writer, partial = self.writer, f"{bucket.name}/partial"
        if partial in writer.alive:
            done = set_or_add(writer, partial, target, stream=REDUCE_SCATTER)
            writer.free(partial)
        path, mean = f"all_reduce/{bucket.name}", self._reduction
        return writer.all_reduce(
            path, REPLICATE, target, reduction=mean, stream=ALL_REDUCE, after=(done,)
        )

    def _settle(self, bucket: Bucket, received: str, stream: str, done: str) -> None:
        """Cast to the dtype of the shard, and set or add."""
        # foreach_reduce: _to_dtype_if_needed, then sharded_param.grad is set or added to
        writer, gradient = self.writer, received
        if self.options.on_host:
            self._to_host(bucket, received, stream, done)
            return
        if not received.endswith("/gradient"):
            gradient = self._shard(
                bucket, "gradient", self.strategy.train.precision.optimizer, stream
            )
            done = set_or_add(writer, received, gradient, stream=stream)
            if stream == ALL_REDUCE:
                # AllReduceState keeps the buffer: the next reduce-scatter may not take its memory
                self._held.append((received, (done,)))
            else:
                writer.free(received)
        self.reduced[bucket.index] = Reduced(gradient, done)
        self.finished = (done,)

    def _to_host(self, bucket: Bucket, received: str, stream: str, done: str) -> None:
        """Cast to the dtype of the shard, copy to the host, and set or add there."""
        # foreach_reduce, `offload_to_cpu`: the host continues during a copy to pinned memory,
        # unless a thread adds the copy to the gradient of an earlier micro-batch
        writer, optimizer = self.writer, self.strategy.train.precision.optimizer
        source = received
        if self._wire is not optimizer:
            source = bucket.shard_buffer(writer, "cast_gradient", optimizer, home=stream)
            writer.allocate(source)
            done = writer.copy(f"cast/{source}", received, source, stream=stream, after=(done,))
        gradient = self._host_shard(bucket, "gradient", stream)
        adds = gradient in writer.alive
        target = self._host_shard(bucket, "landed", stream) if adds else gradient
        writer.allocate(target)
        path = f"offload/{bucket.name}"
        copied = writer.copy(path, source, target, stream=stream, after=(done,))
        added = copied
        if adds or not self.options.pin_memory:
            writer.host_wait(f"{path}/wait", copied)
        else:
            self._leaving.append((bucket, copied))
        if adds:
            added = writer.copy(
                f"add/{gradient}", target, gradient, accumulate=True, stream=CPU, after=(copied,)
            )
            writer.host_wait(f"add/{gradient}/wait", added)
            writer.free(target, uses=(added,))
        if source != received:
            writer.free(source)
        if stream == ALL_REDUCE:  # as AllReduceState keeps it
            self._held.append((received, (copied,)))
        else:
            writer.free(received)
        self.reduced[bucket.index] = Reduced(gradient, added)
        self.finished = (copied,)

    def _host_shard(self, bucket: Bucket, name: str, home: str) -> str:
        dtype, kind = self.strategy.train.precision.optimizer, Kind.GRADIENT
        return bucket.shard_buffer(self.writer, name, dtype, kind, home=home, pool=HOST_POOL)

    def end_backward(self) -> None:
        """Free the buffers of reductions; the compute stream waits for the last of them."""
        # _root_post_backward_final_callback in _fsdp_state.py, finalize_backward of each group,
        # which waits for `grad_offload_event` of each parameter
        for bucket, copied in self._leaving:
            self.writer.host_wait(f"offload/{bucket.name}/wait", copied)
        self._leaving.clear()
        while self._inputs:
            self._free_input(self.finished if len(self._inputs) == 1 else ())
        for name, uses in self._held:
            self.writer.free(name, uses=uses)
        self._held = []
        self.finished = ()

    def _free_input(self, also: tuple[str, ...] = ()) -> None:
        # post_backward: the compute stream waits for the reduce-scatter that reads it
        name, operation = self._inputs.pop(0)
        uses = (operation, *(edge for edge in also if edge != operation))
        self.writer.free(name, uses=uses, verb="free_input")

    def _shard(self, bucket: Bucket, name: str, dtype: DType, home: str) -> str:
        kind = Kind.GRADIENT if name in ("gradient", "partial") else Kind.COMMUNICATION
        return bucket.shard_buffer(self.writer, name, dtype, kind, home=home)


def _unpadded(bucket: Bucket) -> Layout:
    """Return the layout of a bucket's parameters in order, without padding."""
    pieces: list[Piece] = []
    end = 0
    for piece in bucket.layout.pieces:
        pieces.append(replace(piece, start=end))
        end += piece.size
    return Layout(name=f"{bucket.name}/unpadded", pieces=tuple(pieces), elements=end)
