"""Gradients in FSDP1: a flat gradient for each flat parameter, reduced on a stream of their own.

They are divided in two parts, before and after the sum. The flat gradient returns when the stream
that reduces it is done.
"""

from zsim.dtype import DType
from zsim.runtimes.division import two_parts
from zsim.runtimes.fsdp1.options import FSDP1
from zsim.schedule.operation import AllReduce, Copy, Fill, FreeMode, ReduceScatter, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets, Run
from zsim.zero.forward_backward import Passes
from zsim.zero.reduce import Reduced
from zsim.zero.writer import COMPUTE, DATA, REPLICATE, Draft

POST_BACKWARD = "post_backward"
ALL_REDUCE = "all_reduce"


class Reductions:
    """Takes the gradients of each unit's backward and reduces them, one flat gradient at a time."""

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        options: FSDP1,
        *,
        buckets: Buckets,
        passes: Passes,
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.buckets = buckets
        self.passes = passes
        self.reduced: dict[int, Reduced] = {}
        self.finished: tuple[str, ...] = ()
        self._wire = options.reduce_dtype or strategy.precision.compute
        self._collected: dict[int, list[tuple[str, Run]]] = {}
        self._written: dict[int, str] = {}

    def collect(self, unit: int) -> None:
        """Keep what backward of `unit` made until its flat gradient is complete."""
        for position, run in enumerate(self.buckets.runs[unit]):
            source = self.passes.transient(unit, position)
            self._collected.setdefault(run.bucket, []).append((source, run))

    def take(self, bucket: Bucket) -> None:
        """Make the flat gradient, or add to the one that an earlier micro-batch left."""
        draft = self.draft
        flat = self._flat(bucket)
        sources = self._collected.pop(bucket.index)
        adds = flat in draft.alive
        if not adds:
            draft.allocate(flat)
            alone = len(sources) == 1
            start = bucket.elements if alone else 0
            if start < bucket.padded:
                rest = View(buffer=flat, start=start, size=bucket.padded - start)
                path = draft.path(f"zero/{flat}")
                draft.add(Fill(id=path, stream=COMPUTE, target=rest, value=0.0))
            adds = not alone
        for source, run in sources:
            place = View(buffer=flat, start=run.start, size=run.size)
            self._written[bucket.index] = draft.add(
                Copy(
                    id=draft.path(f"{'add' if adds else 'set'}/{flat}/{source}"),
                    stream=COMPUTE,
                    source=draft.all(source),
                    target=place if run.layout is None else draft.all(flat),
                    accumulate=adds,
                    divisor=self.strategy.gradient_accumulation_steps,
                    by_parameter=run.layout is not None,
                )
            )
            draft.free(source)

    def reduce(self, bucket: Bucket) -> None:
        """Reduce the flat gradient to the rank's shard, in the format of the parameter."""
        draft, strategy = self.draft, self.strategy
        flat = self._flat(bucket)
        before, after = two_parts(strategy.replicas)
        written = self._written[bucket.index]
        source = flat
        if self._wire is not strategy.precision.compute:
            source = self._shape(bucket, "wide", bucket.padded, self._wire)
            draft.allocate(source)
            written = self._copy(f"cast/{source}", flat, source, after=(written,))
            draft.free(flat, (written,), mode=FreeMode.DEFERRED)
        if before > 1:
            written = self._copy(
                f"divide/{source}", source, source, divisor=before, after=(written,)
            )
        shard = self._shape(bucket, "received", bucket.shard, self._wire)
        direct = self._wire is strategy.precision.optimizer and bucket.index not in self.reduced
        if direct:
            shard = self._gradient(bucket, POST_BACKWARD)
        draft.allocate(shard)
        done = draft.add(
            ReduceScatter(
                id=draft.path(f"reduce/{bucket.name}"),
                stream=POST_BACKWARD,
                after=(written,),
                group=DATA,
                source=draft.all(source),
                target=draft.all(shard),
                wire=self._wire,
                accumulate=self._wire,
            )
        )
        self._free(source, done)
        self._settle(bucket, shard, done, divisor=after)

    def _settle(self, bucket: Bucket, shard: str, done: str, *, divisor: int) -> None:
        """Sum over the replicas, divide, cast, and set or add."""
        draft, stream = self.draft, POST_BACKWARD
        if self.strategy.replicate > 1:
            stream = ALL_REDUCE
            done = draft.add(
                AllReduce(
                    id=draft.path(f"all_reduce/{bucket.name}"),
                    stream=ALL_REDUCE,
                    after=(done,),
                    group=REPLICATE,
                    source=draft.all(shard),
                    target=draft.all(shard),
                    wire=self._wire,
                    accumulate=self._wire,
                )
            )
        if divisor > 1:
            done = self._copy(f"divide/{shard}", shard, shard, stream=stream, divisor=divisor)
        gradient = f"{bucket.name}/gradient"
        if shard != gradient:
            gradient = self._gradient(bucket, stream)
            first = gradient not in draft.alive
            if first:
                draft.allocate(gradient)
            name = f"{'set' if first else 'add'}/{gradient}"
            done = self._copy(name, shard, gradient, stream=stream, accumulate=not first)
            draft.free(shard, (done,), mode=FreeMode.DEFERRED)
        self.reduced[bucket.index] = Reduced(gradient, done)
        self.finished = (done,)

    def _free(self, name: str, use: str) -> None:
        """Free what the compute stream, or the stream that reduces, allocated."""
        home = self.draft.buffers[name].home
        mode = FreeMode.WAITED if home == POST_BACKWARD else FreeMode.DEFERRED
        self.draft.free(name, (use,), mode=mode)

    def _flat(self, bucket: Bucket) -> str:
        return self.draft.buffer(
            f"{bucket.name}/flat_gradient",
            bucket.padded,
            self.strategy.precision.compute,
            Kind.GRADIENT,
            layout=bucket.layout.name,
        )

    def _gradient(self, bucket: Bucket, home: str) -> str:
        return self.draft.buffer(
            f"{bucket.name}/gradient",
            bucket.shard,
            self.strategy.precision.optimizer,
            Kind.GRADIENT,
            home=home,
            layout=bucket.layout.name,
            shard=DATA,
        )

    def _shape(self, bucket: Bucket, name: str, elements: int, dtype: DType) -> str:
        """A buffer of the stream that reduces: the whole flat gradient, or the rank's shard."""
        return self.draft.buffer(
            f"{bucket.name}/{name}",
            elements,
            dtype,
            Kind.COMMUNICATION,
            home=POST_BACKWARD,
            layout=bucket.layout.name,
            shard=None if elements == bucket.padded and name == "wide" else DATA,
        )

    def _copy(
        self,
        name: str,
        source: str,
        target: str,
        *,
        after: tuple[str, ...] = (),
        stream: str = POST_BACKWARD,
        divisor: int = 1,
        accumulate: bool = False,
    ) -> str:
        draft = self.draft
        return draft.add(
            Copy(
                id=draft.path(name),
                stream=stream,
                after=after,
                source=draft.all(source),
                target=draft.all(target),
                divisor=divisor,
                accumulate=accumulate,
            )
        )
