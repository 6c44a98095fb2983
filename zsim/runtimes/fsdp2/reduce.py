"""Gradients in FSDP2: collected, copied in as rows of each rank, reduced, and cast to shards.

The mean over ranks is taken by the collective (`AVERAGE`), but in fp16: there gradients are divided
by about the root of the number of ranks before, and by the rest after. What a training loop does,
dividing the loss by the micro-batches, stands in the copy here.
"""

from collections import Counter
from dataclasses import replace

from zsim.dtype import DType
from zsim.runtimes.division import two_parts
from zsim.runtimes.fsdp2.options import FSDP2, Sync
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import AllReduce, Copy, Edge, Fill, ReduceScatter, Reduction
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.forward_backward import Passes
from zsim.zero.reduce import Reduced
from zsim.zero.writer import COMPUTE, DATA, REPLICATE, Draft

REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"


def factors(wire: DType, ranks: int) -> tuple[int, int]:
    """What gradients are divided by before and after the collective, which then only sums.

    Both are 1 where the collective takes the mean: in fp32 and bf16.
    """
    return (1, 1) if wire in (DType.FP32, DType.BF16) else two_parts(ranks)


class Reductions:
    """Takes the gradients of each unit's backward and reduces those of each bucket's shards.

    `last` says that the micro-batch being written is the last of its step.
    """

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        options: FSDP2,
        *,
        buckets: Buckets,
        sharded: Buckets,
        passes: Passes,
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.options = options
        self.buckets = buckets
        self.passes = passes
        self.last = False
        self.reduced: dict[int, Reduced] = {}
        sums = options.gradient_sync is Sync.LAST and strategy.gradient_accumulation_steps > 1
        self._trained = {bucket.index: bucket for bucket in sharded.trained}
        self.layouts = tuple(_together(bucket) for bucket in sharded.trained) if sums else ()
        self._wire = options.reduce_dtype or strategy.precision.compute
        self._collected: dict[int, list[tuple[str, set[str]]]] = {}
        self._inputs: list[tuple[str, str]] = []
        self._held: list[tuple[str, tuple[str, ...]]] = []
        self._finished: tuple[str, ...] = ()

    def collect(self, unit: int) -> None:
        """Keep what backward of `unit` made until its bucket is reduced."""
        for position, run in self.buckets.trained_runs(unit):
            names = {parameter.name for parameter in run.trained}
            source = self.passes.transient(unit, position)
            self._collected.setdefault(run.bucket, []).append((source, names))

    def reduce(self, number: int, after: tuple[Edge, ...] = ()) -> None:
        """Reduce what was collected, or add it up if that is for a later micro-batch to do."""
        bucket = self._trained.get(number)
        if bucket is None:
            return
        sources = self._collected.pop(number)
        waits = self.options.gradient_sync is Sync.LAST and not self.last
        together = f"{bucket.name}/accumulated"
        if waits or together in self.draft.alive:
            self._add_up(bucket, together, sources)
            sources = [(together, {piece.parameter for piece in bucket.layout.pieces})]
        if waits:
            return
        while len(self._inputs) >= self.options.reduce_scatter_max_input_buffers:
            self._free_input()
        self._reduce_scatter(bucket, *self._copy_in(bucket, sources, after))

    def _add_up(self, bucket: Bucket, target: str, sources: list[tuple[str, set[str]]]) -> None:
        """Whole gradients of several micro-batches, in the format in which they are reduced."""
        draft, layout = self.draft, _together(bucket)
        draft.buffer(target, layout.elements, self._wire, Kind.GRADIENT, layout=layout.name)
        first = target not in draft.alive
        if first:
            draft.allocate(target)
        self._gather_up(target, sources, adds=not first)

    def _copy_in(
        self, bucket: Bucket, sources: list[tuple[str, set[str]]], after: tuple[Edge, ...]
    ) -> tuple[str, str]:
        """The input of a reduce-scatter, and the operation that completes it."""
        draft = self.draft
        target = draft.buffer(
            f"{bucket.name}/input_gradient",
            bucket.padded,
            self._wire,
            Kind.COMMUNICATION,
            layout=bucket.layout.name,
        )
        draft.allocate(target)
        divisor = self.strategy.gradient_accumulation_steps
        copied = self._gather_up(target, sources, adds=False, divisor=divisor, after=after)
        return target, copied

    def _gather_up(
        self,
        target: str,
        sources: list[tuple[str, set[str]]],
        *,
        adds: bool,
        divisor: int = 1,
        after: tuple[Edge, ...] = (),
    ) -> str:
        """Copy or add the sources, and free them; a parameter of several of them is their sum."""
        draft, copied = self.draft, ""
        times = Counter(name for _, names in sources for name in names)
        if not adds and max(times.values()) > 1:
            fill = Fill(
                id=draft.path(f"zero/{target}"),
                stream=COMPUTE,
                after=after,
                target=draft.all(target),
                value=0.0,
            )
            draft.add(fill)
            adds, after = True, ()
        for source, _ in sources:
            copied = draft.add(
                Copy(
                    id=draft.path(f"{'add' if adds else 'set'}/{target}/{source}"),
                    stream=COMPUTE,
                    after=after,
                    source=draft.all(source),
                    target=draft.all(target),
                    accumulate=adds,
                    divisor=divisor,
                    by_parameter=True,
                )
            )
            after = ()
            draft.free(source)
        return copied

    def _reduce_scatter(self, bucket: Bucket, source: str, copied: str) -> None:
        draft, strategy = self.draft, self.strategy
        before, after = factors(self._wire, strategy.replicas)
        target = self._shard(bucket, "received", self._wire, REDUCE_SCATTER)
        direct = self._wire is strategy.precision.optimizer and bucket.index not in self.reduced
        if direct and self._all_reduces_now:
            target = self._shard(bucket, "gradient", self._wire, REDUCE_SCATTER)
        draft.allocate(target)
        if before > 1:
            copied = self._divide(source, before, REDUCE_SCATTER, (copied,))
        if strategy.data == 1:
            done = draft.add(
                Copy(
                    id=draft.path(f"reduce/{bucket.name}"),
                    stream=REDUCE_SCATTER,
                    after=(copied,),
                    source=draft.all(source),
                    target=draft.all(target),
                )
            )
        else:
            done = draft.add(
                ReduceScatter(
                    id=draft.path(f"reduce/{bucket.name}"),
                    stream=REDUCE_SCATTER,
                    after=(copied,),
                    group=DATA,
                    source=draft.all(source),
                    target=draft.all(target),
                    reduction=self._reduction,
                    wire=self._wire,
                    accumulate=self._wire,
                )
            )
        self._inputs.append((source, done))
        stream = REDUCE_SCATTER
        if strategy.replicate > 1:
            if not self._all_reduces_now:
                self._keep_partial(bucket, target)
                return
            done = self._all_reduce(bucket, target, done)
            stream = ALL_REDUCE
        if after > 1:
            done = self._divide(target, after, stream, (done,))
        self._settle(bucket, target, stream, done)

    @property
    def _reduction(self) -> Reduction:
        mean = factors(self._wire, self.strategy.replicas) == (1, 1)
        return Reduction.AVERAGE if mean and self.strategy.replicas > 1 else Reduction.SUM

    @property
    def _all_reduces_now(self) -> bool:
        return self.last or self.options.all_reduce is Sync.EVERY

    def _divide(self, name: str, divisor: int, stream: str, after: tuple[Edge, ...]) -> str:
        view = self.draft.all(name)
        path = self.draft.path(f"divide/{name}")
        return self.draft.add(
            Copy(id=path, stream=stream, after=after, source=view, target=view, divisor=divisor)
        )

    def _keep_partial(self, bucket: Bucket, received: str) -> None:
        """What is reduced over the shards alone, for the all-reduce of the last micro-batch."""
        draft = self.draft
        partial = self._shard(bucket, "partial", self._wire, REDUCE_SCATTER)
        first = partial not in draft.alive
        if first:
            draft.allocate(partial)
        self._add(received, partial, REDUCE_SCATTER, accumulate=not first)
        draft.free(received)

    def _all_reduce(self, bucket: Bucket, target: str, done: str) -> str:
        draft = self.draft
        partial = f"{bucket.name}/partial"
        if partial in draft.alive:
            done = self._add(partial, target, REDUCE_SCATTER)
            draft.free(partial)
        return draft.add(
            AllReduce(
                id=draft.path(f"all_reduce/{bucket.name}"),
                stream=ALL_REDUCE,
                after=(done,),
                group=REPLICATE,
                source=draft.all(target),
                target=draft.all(target),
                reduction=self._reduction,
                wire=self._wire,
                accumulate=self._wire,
            )
        )

    def _add(self, source: str, target: str, stream: str, *, accumulate: bool = True) -> str:
        draft = self.draft
        return draft.add(
            Copy(
                id=draft.path(f"{'add' if accumulate else 'set'}/{target}"),
                stream=stream,
                source=draft.all(source),
                target=draft.all(target),
                accumulate=accumulate,
            )
        )

    def _settle(self, bucket: Bucket, received: str, stream: str, done: str) -> None:
        """Cast to the format of the shard, and set or add."""
        draft = self.draft
        gradient = received
        if not received.endswith("/gradient"):
            gradient = self._shard(bucket, "gradient", self.strategy.precision.optimizer, stream)
            first = gradient not in draft.alive
            if first:
                draft.allocate(gradient)
            done = self._add(received, gradient, stream, accumulate=not first)
            if stream == ALL_REDUCE:
                self._held.append((received, (done,)))
            else:
                draft.free(received)
        self.reduced[bucket.index] = Reduced(gradient, done)
        self._finished = (done,)

    def end_backward(self) -> None:
        """Free what reductions held; the compute stream waits for the last of them."""
        while self._inputs:
            self._free_input(self._finished if len(self._inputs) == 1 else ())
        for name, uses in self._held:
            self.draft.free(name, uses)
        self._held = []
        self._finished = ()

    @property
    def finished(self) -> tuple[str, ...]:
        """The last operation of the latest reduction."""
        return self._finished

    def _free_input(self, also: tuple[str, ...] = ()) -> None:
        name, operation = self._inputs.pop(0)
        uses = (operation, *(edge for edge in also if edge != operation))
        self.draft.free(name, uses, verb="free_input")

    def _shard(self, bucket: Bucket, name: str, dtype: DType, home: str) -> str:
        return self.draft.buffer(
            f"{bucket.name}/{name}",
            bucket.shard,
            dtype,
            Kind.GRADIENT if name in ("gradient", "partial") else Kind.COMMUNICATION,
            home=home,
            layout=bucket.layout.name,
            shard=DATA,
        )


def _together(bucket: Bucket) -> Layout:
    """A bucket's parameters one after the other, without padding."""
    pieces: list[Piece] = []
    end = 0
    for piece in bucket.layout.pieces:
        pieces.append(replace(piece, start=end))
        end += piece.size
    return Layout(name=f"{bucket.name}/unpadded", pieces=tuple(pieces), elements=end)
