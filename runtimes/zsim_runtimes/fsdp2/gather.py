"""Parameters in FSDP2: shards copied in, gathered in place, copied out, freed or kept.

A group may be gathered in two dtypes: weights that are cast to float8 before, and the rest. Both
are bytes of one all-gather (`_get_all_gather_input_metadatas`, `_fsdp_collectives.py`).

Functions named in comments are from `torch/distributed/fsdp/_fully_shard` in torch 2.13, of
`FSDPParamGroup` in `_fsdp_param_group.py` unless another file is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.dtype import DType
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Edge, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.zero.bucket import Bucket
from zsim.zero.gather import AfterUpdate
from zsim.zero.names import INNER
from zsim.zero.step_skeleton import StepPart
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.fsdp2.placement import shard_axis, sharded_by_second
from zsim_runtimes.wrapping import WrappedStep

# FSDPCommContext.lazy_init: copies in have a separate stream, so that they overlap gathers
COPY_IN = "copy_in"
ALL_GATHER = "all_gather"


# hp_tensor_and_scale_to_float8 (torchao 0.19, torchao/float8/float8_training_tensor.py): the
# multiplication by the scale, to_fp8_saturated's clamp, the cast; eager, for each weight
FLOAT8_CAST_KERNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPart:
    """Parameters of a group that are gathered in one dtype.

    `bucket` holds them, or the whole group if it has one part. In float8, each parameter is cast
    separately.
    """

    bucket: Bucket
    dtype: DType

    @property
    def launches(self) -> int:
        """Number of kernels that cast the shards of its parameters."""
        narrows = self.dtype is DType.FP8
        return FLOAT8_CAST_KERNELS * len(self.bucket.layout.pieces) if narrows else 1


class GroupGathers(StepPart):
    """Groups that are whole, in flight, or kept sharded over the inner ranks.

    Shards are copied in on the stream `copies_on`. `parts` has one or two parts for each group, by
    number. The first read of shards in a step waits for `ready`, the last operation of the previous
    step that it depends on.

    Attributes:
        places: views of whole parameters of groups with two parts, by name.
    """

    def __init__(
        self,
        step: WrappedStep,
        options: FSDP2,
        *,
        parts: Sequence[tuple[GatheredPart, ...]],
        ready: str,
        copies_on: str = COPY_IN,
    ) -> None:
        super().__init__(step)
        self.options = options
        self.parts = parts
        # FSDPCommContext.get_all_gather_streams: the current stream with `async_op`
        self._copies_on = copies_on
        self._shards: dict[int, list[str]] = {}
        for shard, state in zip(step.kept.all, step.states, strict=True):
            self._shards.setdefault(shard.index, []).append(state.parameter)
        placement = options.shard_placement_fn
        self._by_second = sharded_by_second(step.model, self.buckets.all, step.strategy, placement)
        self._inner = step.strategy.inner
        self._pending: dict[int, str] = {}
        self._resharded: dict[int, str] = {}
        self._kept: tuple[list[str], str] | None = None
        # FSDPState._root_pre_forward (_fsdp_state.py): the stream waits for the last update, once.
        self._updated = AfterUpdate(ready)
        self._inner_layouts: list[Layout] = []
        if self._inner is not None:
            self._inner_layouts = [
                each.over_inner("inner", by_block=True) for each in self.buckets.all
            ]
        apart = [each.bucket for own in parts if len(own) > 1 for each in own]
        self.layouts = [
            *self._inner_layouts,
            *(layout for each in apart for layout in (each.layout, each.plain)),
        ]
        self.places = dict[str, View]()
        for own in parts:
            if len(own) > 1:
                self.places |= self._places(own)

    def whole(self, bucket: Bucket) -> str:
        """Return the buffer of a bucket's whole parameters, the first of two with two parts."""
        return self._wholes(bucket)[0]

    def _wholes(self, bucket: Bucket) -> list[str]:
        return [self._whole(each) for each in self.parts[bucket.index]]

    def _whole(self, part: GatheredPart) -> str:
        return part.bucket.buffer(self.writer, "whole", part.dtype, layout=part.bucket.plain)

    def _places(self, parts: Sequence[GatheredPart]) -> dict[str, View]:
        """Return the views of the whole parameters of a group, by name."""
        return {
            piece.parameter: View(buffer=self._whole(each), start=piece.start, size=piece.size)
            for each in parts
            for piece in each.bucket.plain.pieces
        }

    def gather(self, number: int) -> None:
        """Gather the bucket (unshard), unless it is whole or in flight."""
        writer, bucket = self.writer, self.buckets.all[number]
        if number in self._pending or self.whole(bucket) in writer.alive:
            return
        inner = number in self._resharded
        # _all_gather_process_group: that of the mesh, or of the post-forward mesh
        axis, ranks = shard_axis(bucket, self.strategy)
        if inner and self._inner:
            axis, ranks = INNER, self._inner
        if ranks == 1:  # unshard: "world_size == 1", no gather
            self._pending[number] = ""
            return
        sources = [self._inner_shard(bucket)] if inner else self._fetched(number, self._copies_on)
        parts = self.parts[number]
        casts = self._casts(bucket, sources, inner=inner)
        gathered = self._gathered(bucket, inner=inner)
        writer.allocate(*gathered)
        # foreach_all_gather (_fsdp_collectives.py): all_gather_copy_in into the rank's own slot of
        # the output, which is gathered in place
        after = () if any(casts) else self._after_update(number)
        slots: list[View] = []
        copied = ""
        for part, cast, target in zip(parts, casts, gathered, strict=True):
            slot = View(buffer=target, size=part.bucket.padded // ranks, axis=axis)
            path = f"copy_in/{part.bucket.name}"
            source = cast or sources[0]
            copied = writer.copy(path, source, slot, stream=self._copies_on, after=after)
            slots.append(slot)
        writer.free(*(cast for cast in casts if cast))
        self._free_fetched(sources)
        for part, slot in zip(parts, slots, strict=True):
            path, after = f"gather/{part.bucket.name}", () if len(parts) > 1 else (copied,)
            self._pending[number] = writer.all_gather(
                path, axis, slot, slot.buffer, stream=ALL_GATHER, after=after
            )
        if len(parts) > 1:
            path = f"gather/{bucket.name}"
            self._pending[number] = writer.together(path, len(parts), after=(copied,))

    def _fetched(self, number: int, stream: str) -> list[str]:
        """Return the shards of a group on the device, copied there if they are on the host."""
        # FSDPParam.all_gather_inputs (_fsdp_param.py): in the storage dtype, cast afterwards
        if not self.options.on_host:
            return self._shards[number]
        writer, found = self.writer, list[str]()
        for kept in (writer.buffers[name] for name in self._shards[number]):
            name = writer.buffer(
                kept.name.replace("/parameter", "/fetched"),
                kept.elements,
                kept.dtype,
                Kind.COMMUNICATION,
                home=stream,
                layout=kept.layout,
                shard=kept.shard,
            )
            writer.allocate(name)
            after = self._after_update(number)
            copied = writer.copy(f"fetch/{kept.name}", kept.name, name, stream=stream, after=after)
            if not self.options.pin_memory:  # blocks: pageable memory
                writer.host_wait(f"fetch/{kept.name}/wait", copied)
            found.append(name)
        return found

    def _free_fetched(self, sources: Sequence[str]) -> None:
        self.writer.free(*(each for each in sources if each.endswith("/fetched")))

    def _casts(self, bucket: Bucket, sources: Sequence[str], *, inner: bool) -> list[str | None]:
        """Return a copy of the shards in each part's dtype; None for a part that needs no copy.

        A copy also includes shards of frozen parameters; PyTorch copies those directly to the slot.
        """
        # _get_param_all_gather_inputs (_fsdp_collectives.py): one foreach copy of all cast shards
        writer, found = self.writer, list[str | None]()
        after: tuple[Edge, ...] | None = None
        for part in self.parts[bucket.index]:
            mixed = len(sources) > 1 or part.bucket is not bucket
            if not mixed and writer.buffers[sources[0]].dtype is part.dtype:
                found.append(None)
                continue
            cast = self._input(part, inner=inner)
            writer.allocate(cast)
            after = self._after_update(bucket.index) if after is None else ()
            for source in sources:
                path = f"cast/{source.removesuffix('/parameter')}"
                if part.bucket is not bucket:
                    path = f"{path}/{part.bucket.name}"
                writer.copy(
                    path,
                    source,
                    cast,
                    stream=self._copies_on,
                    after=after,
                    by_parameter=mixed,
                    launches=part.launches,
                )
                after = ()
            found.append(cast)
        return found

    def _input(self, part: GatheredPart, *, inner: bool) -> str:
        """Return the buffer of a rank's cast shards."""
        writer, bucket = self.writer, part.bucket
        if not (inner and self._inner):
            return bucket.shard_buffer(writer, "input", part.dtype, home=self._copies_on)
        return writer.buffer(
            f"{bucket.name}/inner_input",
            bucket.padded // self._inner,
            self.compute,
            Kind.COMMUNICATION,
            home=self._copies_on,
            layout=self._inner_layouts[bucket.index].name,
            shard=INNER,
        )

    def _after_update(self, number: int) -> tuple[Edge, ...]:
        """Return the edge that the copy of a shard waits for: the update, or its resharding."""
        # unshard, _reshard_after_forward_event
        if number in self._resharded:
            return (self._resharded[number],)
        return self._updated.take()

    def copy_out(self, number: int, *, forward: bool) -> None:
        """Wait for the gather and copy the result into whole parameters.

        In forward, the gathered tensor is kept until the next one is copied out, because a variable
        still holds it.
        """
        if number not in self._pending:
            return
        writer, bucket = self.writer, self.buckets.all[number]
        gather = self._pending.pop(number)
        inner = number in self._resharded
        gathered = self._gathered(bucket, inner=inner) if gather else None
        writer.allocate(*self._wholes(bucket))
        copied = ""
        # foreach_all_gather_copy_out (_fsdp_collectives.py) on the compute stream; with one rank,
        # wait_for_unshard copies the shard itself
        fetched = self._fetched(number, COMPUTE) if gathered is None else []
        for place, part in enumerate(self.parts[number]):
            for source in fetched if gathered is None else [gathered[place]]:
                name = source.removesuffix("/parameter") if fetched else part.bucket.name
                if fetched and part.bucket is not bucket:
                    name = f"{name}/{part.bucket.name}"
                path, after = f"copy_out/{name}", (gather,) if gather else ()
                whole = self._whole(part)
                turns = self._by_second[number] if gather else 0
                target = self._split(part) if turns else whole
                copied = writer.copy(path, source, target, after=after, by_parameter=True)
                if turns:  # "Chunk-cat from the temporary to the final all-gather output tensors"
                    writer.copy(f"chunk_cat/{name}", target, whole, launches=turns)
                    writer.free(target)
        if forward:
            self.end_forward()
        if inner:
            del self._resharded[number]
            writer.free(self._inner_shard(bucket), uses=(gather,))
        if gathered is None:
            self._free_fetched(fetched)
            return
        # wait_for_unshard: implicit prefetching defers the free to the next copy-out
        # (AllGatherState), so that this one overlaps the next gather
        if forward:
            self._kept = (gathered, copied)
        else:
            writer.free(*gathered, uses=(gather, copied))

    def _split(self, part: GatheredPart) -> str:
        """Allocate a copy of whole parameters whose parts are not yet in rows; return its name."""
        bucket = part.bucket
        name = bucket.buffer(self.writer, "split", part.dtype, layout=bucket.plain)
        self.writer.allocate(name)
        return name

    def end_forward(self) -> None:
        """Free the gathered tensor that was kept, once it is copied out."""
        if self._kept is not None:
            gathered, copied = self._kept
            self.writer.free(*gathered, uses=(copied,))
            self._kept = None

    def after_forward(self, number: int) -> None:
        """Reshard a block as the options set."""
        writer, bucket = self.writer, self.buckets.all[number]
        if self.options.reshard_after_forward is False:  # reshard: returns in forward
            return
        if self._inner is not None:
            # _use_post_forward_mesh; FSDPParam.to_sharded_post_forward (_fsdp_param.py) clones
            shard, path = self._inner_shard(bucket), f"reshard/{bucket.name}"
            writer.allocate(shard)
            self._resharded[number] = writer.copy(
                path, self.whole(bucket), shard, by_parameter=True
            )
        writer.free(*self._wholes(bucket))

    def after_backward(self, number: int, *, last: bool) -> None:
        """Free whole parameters, unless they are kept for the next micro-batch.

        A block that backward did not reach may be sharded over the inner ranks, or be gathered in
        vain.
        """
        writer, bucket = self.writer, self.buckets.all[number]
        inner, gather = number in self._resharded, self._pending.pop(number, "")
        if gather:  # finalize_backward: "a mistargeted unshard"
            writer.free(*self._gathered(bucket, inner=inner), uses=(gather,))
        if not (last or self.options.reshard_after_backward):  # post_backward
            return
        self.reshard(number)
        if inner:
            del self._resharded[number]
            writer.free(self._inner_shard(bucket), uses=(gather,) if gather else ())

    def reshard(self, number: int) -> None:
        """Free whole parameters, if there are any."""
        bucket = self.buckets.all[number]
        if self.whole(bucket) in self.writer.alive:
            self.writer.free(*self._wholes(bucket))

    def _gathered(self, bucket: Bucket, *, inner: bool) -> list[str]:
        name = "inner_gathered" if inner else "gathered"
        layout = self._inner_layouts[bucket.index] if inner else None
        return [
            each.bucket.buffer(self.writer, name, each.dtype, home=self._copies_on, layout=layout)
            for each in self.parts[bucket.index]
        ]

    def _inner_shard(self, bucket: Bucket) -> str:
        """Return the buffer of the rank's shard among the inner ranks, in the compute dtype."""
        assert self._inner is not None
        layout = self._inner_layouts[bucket.index]
        return bucket.inner_buffer(self.writer, layout, self._inner, self.compute, home=COMPUTE)
