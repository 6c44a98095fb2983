"""Parameters in FSDP2: shards into their slot, gathered in place, copied out, freed or kept."""

from collections.abc import Sequence

from zsim.runtimes.fsdp2.options import FSDP2
from zsim.schedule.layout import Layout
from zsim.schedule.operation import AllGather, Copy, Edge, Previous, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.state import BucketState
from zsim.zero.writer import COMPUTE, DATA, INNER, Draft

COPY_IN = "copy_in"
ALL_GATHER = "all_gather"


class Gathers:
    """What is whole, what is on its way, and what is kept sharded over the inner ranks.

    `last` says that the micro-batch being written is the last of its step.
    """

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        *,
        options: FSDP2,
        buckets: Buckets,
        sharded: Buckets,
        states: Sequence[BucketState],
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.options = options
        self.buckets = buckets
        self._shards: dict[int, list[str]] = {}
        for shard, state in zip(sharded.all, states, strict=True):
            self._shards.setdefault(shard.index, []).append(state.parameter)
        self.last = False
        self.layouts: list[Layout] = []
        self._inner = strategy.inner
        self._pending: dict[int, str] = {}
        self._resharded: dict[int, str] = {}
        self._kept: tuple[str, str] | None = None
        self._updated = f"step/update/{sharded.trained[-1].name}/update"
        self._fresh = False
        if self._inner is not None:
            self.layouts = [self._inner_layout(bucket) for bucket in buckets.all]

    def whole(self, bucket: Bucket) -> str:
        """The buffer of a bucket's whole parameters."""
        return self.draft.buffer(
            f"{bucket.name}/whole",
            bucket.padded,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            layout=bucket.plain.name,
        )

    def gather(self, number: int) -> None:
        """Unshard: gather the bucket, unless it is whole or on its way."""
        draft, bucket = self.draft, self.buckets.all[number]
        if number in self._pending or self.whole(bucket) in draft.alive:
            return
        inner = number in self._resharded
        sources = [self._sharded_over_inner(bucket)] if inner else self._shards[number]
        axis = INNER if inner else DATA
        ranks = self.strategy.data if self._inner is None or not inner else self._inner
        if ranks == 1:
            self._pending[number] = ""
            return
        slot = bucket.padded // ranks
        cast = self._cast(bucket, sources, inner=inner)
        gathered = self._gathered(bucket, inner=inner)
        draft.allocate(gathered)
        draft.add(
            Copy(
                id=draft.path(f"copy_in/{bucket.name}"),
                stream=COPY_IN,
                after=() if cast else self._after_update(number),
                source=draft.all(cast or sources[0]),
                target=View(buffer=gathered, size=slot, axis=axis),
            )
        )
        if cast:
            draft.free(cast)
        self._pending[number] = draft.add(
            AllGather(
                id=draft.path(f"gather/{bucket.name}"),
                stream=ALL_GATHER,
                after=(draft.path(f"copy_in/{bucket.name}"),),
                group=axis,
                source=View(buffer=gathered, size=slot, axis=axis),
                target=draft.all(gathered),
                wire=self.strategy.precision.compute,
            )
        )

    def _cast(self, bucket: Bucket, sources: Sequence[str], *, inner: bool) -> str | None:
        """A copy of the shards in the compute format, where formats or kinds are mixed.

        Shards of frozen parameters stand in it, too; upstream they are copied to the slot at once.
        """
        draft, precision = self.draft, self.strategy.precision
        mixed = len(sources) > 1
        if not mixed and (not precision.has_master or bucket.frozen):
            return None
        name = "inner_input" if inner else "input"
        cast = draft.buffer(
            f"{bucket.name}/{name}",
            bucket.padded // (self._inner if inner and self._inner else self.strategy.data),
            precision.compute,
            Kind.COMMUNICATION,
            home=COPY_IN,
            layout=_inner_name(bucket) if inner else bucket.layout.name,
            shard=INNER if inner else DATA,
        )
        draft.allocate(cast)
        after = self._after_update(bucket.index)
        for source in sources:
            draft.add(
                Copy(
                    id=draft.path(f"cast/{source.removesuffix('/parameter')}"),
                    stream=COPY_IN,
                    after=after,
                    source=draft.all(source),
                    target=draft.all(cast),
                    by_parameter=mixed,
                )
            )
            after = ()
        return cast

    def _after_update(self, number: int) -> tuple[Edge, ...]:
        """What the copy of a shard waits for: the update, or that it was sharded again."""
        if number in self._resharded:
            return (self._resharded[number],)
        if self._fresh:
            return ()
        self._fresh = True  # the stream has waited for the last update
        return (Previous(self._updated),)

    def copy_out(self, number: int, *, forward: bool) -> None:
        """Wait for the gather and copy what came into whole parameters.

        In forward the gathered tensor is kept until the next one is copied out, which happens while
        a variable of `wait_for_unshard` still holds the last one.
        """
        if number not in self._pending:
            return
        draft, bucket = self.draft, self.buckets.all[number]
        gather = self._pending.pop(number)
        inner = number in self._resharded
        gathered = self._gathered(bucket, inner=inner) if gather else None
        whole = self.whole(bucket)
        draft.allocate(whole)
        copied = ""
        for source in self._shards[number] if gathered is None else (gathered,):
            name = bucket.name if source == gathered else source.removesuffix("/parameter")
            copied = draft.add(
                Copy(
                    id=draft.path(f"copy_out/{name}"),
                    stream=COMPUTE,
                    after=(gather,) if gather else (),
                    source=draft.all(source),
                    target=draft.all(whole),
                    by_parameter=True,
                )
            )
        if forward:
            self.end_forward()
        if inner:
            del self._resharded[number]
            draft.free(self._sharded_over_inner(bucket), (gather,))
        if gathered is None:
            return
        if forward:
            self._kept = (gathered, copied)
        else:
            draft.free(gathered, (gather, copied))

    def end_forward(self) -> None:
        """Free the gathered tensor that was kept, once it is copied out."""
        if self._kept is not None:
            gathered, copied = self._kept
            self.draft.free(gathered, (copied,))
            self._kept = None

    def after_forward(self, number: int) -> None:
        """Reshard a block as the options say."""
        draft, bucket = self.draft, self.buckets.all[number]
        if self.options.reshard_after_forward is False:
            return
        if self._inner is not None:
            shard = self._sharded_over_inner(bucket)
            draft.allocate(shard)
            self._resharded[number] = draft.add(
                Copy(
                    id=draft.path(f"reshard/{bucket.name}"),
                    stream=COMPUTE,
                    source=draft.all(self.whole(bucket)),
                    target=draft.all(shard),
                    by_parameter=True,
                )
            )
        draft.free(self.whole(bucket))

    def after_backward(self, number: int) -> None:
        """Free whole parameters, unless they are kept for the next micro-batch.

        A block that backward did not come to may be sharded over the inner ranks, or be gathered
        again for nothing.
        """
        draft, bucket = self.draft, self.buckets.all[number]
        inner, gather = number in self._resharded, self._pending.pop(number, "")
        if gather:
            draft.free(self._gathered(bucket, inner=inner), (gather,))
        if not (self.last or self.options.reshard_after_backward):
            return
        if self.whole(bucket) in draft.alive:
            draft.free(self.whole(bucket))
        if inner:
            del self._resharded[number]
            draft.free(self._sharded_over_inner(bucket), (gather,) if gather else ())

    def _gathered(self, bucket: Bucket, *, inner: bool) -> str:
        return self.draft.buffer(
            f"{bucket.name}/{'inner_gathered' if inner else 'gathered'}",
            bucket.padded,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            home=COPY_IN,
            layout=_inner_name(bucket) if inner else bucket.layout.name,
        )

    def _sharded_over_inner(self, bucket: Bucket) -> str:
        """The rank's shard among the inner ranks alone, in the compute format."""
        assert self._inner is not None
        return self.draft.buffer(
            f"{bucket.name}/inner",
            bucket.padded // self._inner,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            layout=_inner_name(bucket),
            shard=INNER,
        )

    def _inner_layout(self, bucket: Bucket) -> Layout:
        return Layout(
            name=_inner_name(bucket),
            pieces=bucket.layout.pieces,
            elements=bucket.padded,
            axis=INNER,
            blocks=bucket.layout.blocks,
        )


def _inner_name(bucket: Bucket) -> str:
    return f"{bucket.name}/inner"
