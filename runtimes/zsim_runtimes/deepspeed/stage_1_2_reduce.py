"""Gradients in DeepSpeed's stages 1 and 2: buckets are all-reduced, and a rank keeps its part.

Functions named in comments are from `DeepSpeedZeroOptimizer` in
`runtime/zero/stage_1_and_2.py`, DeepSpeed 0.19.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Edge, FreeMode, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.zero.bucket import Bucket
from zsim.zero.state import Reduced
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.deepspeed.host_partition import HostPartitions, ReducedSlice
from zsim_runtimes.deepspeed.options import DeepSpeed

REDUCTION = "reduction"  # __init__: reduction_stream
MIGRATION = "migration"  # __init__: migration_stream of jren73/DeepSpeed at e4bd86a


@dataclass(frozen=True, slots=True)
class BucketedGradient:
    """A gradient in the bucket: its flat tensor, and its offsets there and in the bucket."""

    name: str
    flat: Bucket
    start: int
    offset: int
    size: int


def _pieces_by_parameter(layout: Layout) -> dict[str, list[Piece]]:
    """Return the non-empty pieces of each parameter."""
    pieces: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        if piece.size:
            pieces.setdefault(piece.parameter, []).append(piece)
    return pieces


def one_after_another(members: Iterable[BucketedGradient]) -> list[BucketedGradient]:
    """Return gradients with new offsets, without gaps."""
    found: list[BucketedGradient] = []
    end = 0
    for each in members:
        found.append(dataclasses.replace(each, offset=end))
        end += each.size
    return found


def _runs(members: Iterable[BucketedGradient], bucket: str) -> list[View]:
    """Return the parts of a bucket that gradients fill, contiguous ones together."""
    found: list[View] = []
    for each in members:
        if found and found[-1].start + found[-1].size == each.offset:
            found[-1] = replace(found[-1], size=found[-1].size + each.size)
        else:
            found.append(View(buffer=bucket, start=each.offset, size=each.size))
    return found


class AllReducedBuckets(StepPart):
    """The bucket that gradients are copied into; two that alternate if reductions overlap.

    It holds gradients of all flat tensors, one for each group of parameters.
    """

    def __init__(self, step: Step, options: DeepSpeed) -> None:
        super().__init__(step)
        self.flats = step.buckets.trained
        self.reduced: dict[int, Reduced] = {}
        self._limit = options.reduce_bucket_size
        self._overlaps = bool(options.overlap_comm)
        self._stream = REDUCTION if self._overlaps else COMPUTE
        self._wire = options.communication_data_type or self.compute
        self.host: HostPartitions | None = None
        self.layouts: dict[str, Layout] = {}
        self._pieces = {flat.index: _pieces_by_parameter(flat.layout) for flat in self.flats}
        if options.offload_optimizer.is_on:
            pinned = options.offload_optimizer.pin_memory
            copies = MIGRATION if options.migration_stream else self._stream
            self.host = HostPartitions(step, stream=self._stream, copies=copies, pinned=pinned)
        stage, train = step.strategy.zero.stage, step.strategy.train
        self._micro_batches = train.gradient_accumulation_steps if stage == 2 else 1
        self._micro_batch = -1  # counts only reduced ones
        self._members: list[BucketedGradient] = []
        self._filled = 0
        self._flushed = 0
        self._copied = ""
        self._done = ""
        self._waits: tuple[Edge, ...] = ()

    def begin(self) -> None:
        """Allocate the buckets and the rank's parts."""
        self._flushed = 0
        self._micro_batch += 1
        # setup_buckets: "ipg" is independent parallel gradients; a second buffer with overlap_comm
        self.writer.allocate(*self._buckets)
        for flat in self.flats if self.host is None else ():
            owned = self._owned(flat)  # copy_grads_in_partition: `grads_in_partition`
            self.writer.allocate(owned)
            if size := flat.padded - flat.elements:
                padding = View(buffer=owned, start=flat.elements, size=size, layout=flat.name)
                self.writer.fill(f"pad/{owned}", padding, 0.0, stream=self._stream)

    @property
    def _buckets(self) -> list[str]:
        """Buffers of `reduce_bucket_size` elements each."""
        return [
            self.writer.buffer(f"ipg{index}", self._limit, self.compute, Kind.COMMUNICATION)
            for index in range(2 if self._overlaps else 1)
        ]

    @property
    def _bucket(self) -> str:
        """The bucket that is being filled."""
        # reduce_independent_p_g_buckets_and_remove_grads: `bucket.index = 1 - bucket.index`
        buckets = self._buckets
        return buckets[self._flushed % len(buckets)]

    def _owned(self, flat: Bucket) -> str:
        return flat.shard_buffer(
            self.writer, "owned", self.compute, Kind.GRADIENT, home=self._stream
        )

    def add(self, name: str, source: View, flat: Bucket, start: int, *, divisor: int) -> None:
        """Copy the gradient at offset `start` of a flat tensor into the bucket.

        A gradient larger than the bucket is reduced alone.
        """
        # reduce_independent_p_g_buckets_and_remove_grads: first reduce_ipg_grads if it would
        # overflow
        if self._members and self._filled + source.size > self._limit:
            self._flush()
        offset = self._filled
        if source.size > self._limit:  # extra_large_param_to_reduce
            alone = [BucketedGradient(name, flat, start, 0, source.size)]
            self._reduce(alone, source, divisor, stream=COMPUTE)
            return
        target = View(buffer=self._bucket, start=offset, size=source.size)
        self._copied = self.writer.copy(
            f"bucket/{name}", source, target, divisor=divisor, after=self._waits
        )
        self._waits = ()
        self._members.append(BucketedGradient(name, flat, start, offset, source.size))
        self._filled += source.size

    def _flush(self) -> None:
        """Reduce the bucket and keep the rank's part of it."""
        if self._members:
            filled = View(buffer=self._bucket, size=self._filled)
            members, self._members, self._filled = self._members, [], 0
            self._reduce(members, filled, 1, stream=self._stream)

    def _reduce(
        self, members: list[BucketedGradient], source: View, divisor: int, *, stream: str
    ) -> None:
        """Divide on `stream` into a new tensor, all-reduce it, and keep the rank's part."""
        number = self._flushed
        # average_tensor: the current stream waits for the previous reduction, which has read the
        # bucket that is filled next
        self._waits = (self._done,) if self._overlaps and number else ()
        self._flushed += 1
        axes = dict.fromkeys(each.flat.axis for each in members)
        for axis in axes:  # average_tensor: allreduce_and_scatter for each process group
            own = [each for each in members if each.flat.axis == axis]
            parts = [source] if len(axes) == 1 else _runs(own, source.buffer)
            name = str(number) if len(axes) == 1 else f"{number}/{axis}"
            self._reduce_over(axis, own, parts, number=name, divisor=divisor, stream=stream)

    def _reduce_over(
        self,
        axis: str,
        bucketed: Sequence[BucketedGradient],
        parts: Sequence[View],
        *,
        number: str,
        divisor: int,
        stream: str,
    ) -> None:
        """Reduce the gradients in `parts` of a bucket over an axis."""
        writer, own = self.writer, self._stream
        members = one_after_another(bucketed)
        elements = sum(each.size for each in parts)
        flat = writer.buffer(
            f"flat{number}",
            elements,
            self._wire,
            Kind.COMMUNICATION,
            home=stream,
            layout=self._measured(number, members),
        )
        writer.allocate(flat)
        # allreduce_bucket flattens into a new tensor, divides by the ranks and all-reduces
        after = (self._copied,) if stream != COMPUTE else ()
        ranks = self.strategy.parallel.data
        divided, start = "", 0
        for place, part in enumerate(parts):
            target = View(buffer=flat, start=start, size=part.size)
            path = f"divide{number}" if len(parts) == 1 else f"divide{number}/{place}"
            divided = writer.copy(
                path, part, target, divisor=divisor * ranks, stream=stream, after=after
            )
            start += part.size
        after = (divided,) if stream != own else ()
        done = writer.all_reduce(f"reduce{number}", axis, flat, stream=own, after=after)
        if self.host is not None:
            done = self._to_host(self.host, members, flat, done) or done
        # allreduce_and_copy_with_multiple_ranks copies the rank's part back,
        # copy_grads_in_partition out of the bucket: all of a gradient, a part, or nothing
        for position, each in enumerate(members if self.host is None else ()):
            start, size, layout = each.start, each.size, each.flat.name
            reduced = View(buffer=flat, start=start, size=size, layout=layout, origin=each.offset)
            kept = View(buffer=self._owned(each.flat), start=start, size=size, layout=layout)
            done = writer.copy(f"keep{number}/{position}", reduced, kept, stream=own)
        kept_in, filled, read_on = self._owned, done, own
        if self.host is not None:
            kept_in, filled = self.host.gradient, self.host.copied or done
            read_on = self.host.copies
        if flat in writer.alive:
            # copy_grads_in_partition at e4bd86a: no stream waits for copies on the migration stream
            mode = FreeMode.DEFERRED if read_on == MIGRATION else FreeMode.WAITED
            uses = (done,) if {stream, own, read_on} != {own} else ()
            writer.free(flat, uses=uses, mode=mode)
        self._done = done
        self.reduced = {each.index: Reduced(kept_in(each), filled) for each in self.flats}

    def _measured(self, number: str, members: Sequence[BucketedGradient]) -> str | None:
        """Return the layout of a bucket whose gradients are measured, if ranks hold copies.

        A norm counts one of the copies on several tensor ranks; the layout marks copies.
        """
        # complete_grad_norm_calculation_for_cpu_offload: `is_model_parallel_parameter(p) or
        # (self.model_parallel_rank == 0)`
        if self.host is None:
            return None
        pieces = [
            replace(piece, start=each.offset)
            for each in members
            for piece in self._pieces[each.flat.index].get(each.name, ())
        ]
        if not any(piece.copies for piece in pieces):
            return None
        name, elements = f"flat{number}", sum(each.size for each in members)
        self.layouts[name] = Layout(name=name, pieces=tuple(pieces), elements=elements)
        return name

    def _to_host(
        self, host: HostPartitions, members: Sequence[BucketedGradient], flat: str, done: str
    ) -> str:
        """Copy the bucket's part of each parameter to the host, in the model's dtype."""
        writer = self.writer
        if self._wire is not self.compute:  # allreduce_and_copy_with_multiple_ranks copies back
            elements = writer.buffers[flat].elements
            name = f"{flat}/back"
            layout, kind = writer.buffers[flat].layout, Kind.COMMUNICATION
            writer.buffer(name, elements, self.compute, kind, home=self._stream, layout=layout)
            writer.allocate(name)
            done = writer.copy(f"back/{flat}", flat, name, stream=self._stream, after=(done,))
            writer.free(flat, uses=(done,))
            flat = name
        last = self._micro_batch == self._micro_batches - 1
        for each in members:
            if each.size:
                view = View(
                    buffer=flat,
                    start=each.start,
                    size=each.size,
                    layout=each.flat.name,
                    origin=each.offset,
                )
                part = ReducedSlice(each.flat, each.name, view)
                done = host.keep(part, first=self._micro_batch == 0, last=last)
        if flat.endswith("/back"):
            writer.free(flat, uses=(done,) if host.copies != self._stream else ())
        return done

    def finish(self, *, last: bool) -> None:
        """Reduce the remaining gradients, free the buckets, and add to earlier micro-batches."""
        # independent_gradient_partition_epilogue: reduce_ipg_grads, synchronize the device if
        # overlapping, _release_ipg_buffers
        self._flush()
        done = self._done
        if self._overlaps:
            self.writer.host_wait("host_wait", done)
        self.writer.free(*self._buckets, uses=(done,) if self._overlaps else ())
        self._waits = ()
        if self.host is None and self._micro_batches > 1:
            for flat in self.flats:
                self._add_up(flat, done, last=last)

    def _add_up(self, flat: Bucket, done: str, *, last: bool) -> None:
        """Add the rank's part to the sum of earlier micro-batches, in the model's dtype."""
        # independent_gradient_partition_epilogue: `all_grad_tensors`
        writer, owned, elsewhere = self.writer, self._owned(flat), self._stream != COMPUTE
        total = flat.shard_buffer(writer, "gradient", self.compute, Kind.GRADIENT)
        first = total not in writer.alive
        if first:
            writer.allocate(total)
        path, after = f"accumulate/{flat.name}", (done,) if elsewhere else ()
        added = writer.copy(path, owned, total, accumulate=not first, after=after)
        writer.free(owned, uses=(added,) if elsewhere else ())
        if last:
            self.reduced[flat.index] = Reduced(total, added)
