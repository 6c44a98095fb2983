"""Weights of narrow GEMMs, cast once a step: the workspaces of Transformer Engine.

The first micro-batch of a step casts each weight into a buffer that persists, and the others read
it (`is_first_microbatch` of `TELinear`, megatron/core/extensions/transformer_engine.py;
`quantize_weight` of Transformer Engine, pytorch/module/base.py). Forward reads one copy, backward
another along the other axis, unless GEMMs read any layout. Here the weights of a bucket are cast
before the first unit that reads the bucket; in Transformer Engine each before its own GEMM.
"""

from collections.abc import Iterable, Sequence

from zsim.dtype import DType
from zsim.model.kernel import KernelKind, streaming
from zsim.model.model import Model, Parameter
from zsim.model.narrow_products import MEASURED, NarrowProducts
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Edge, Role, View
from zsim.schedule.operation_list import COMMUNICATION
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.execution import NarrowWeights
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.state import BucketState


class CastWeights:
    """Writes the casts of weights, bucket by bucket.

    One buffer has a byte for each element. The rest of the copies and scales, which the same kernel
    writes, is in another buffer that is filled: its bytes count, not its values.

    Attributes:
        places: views of the weights that are cast, by name.
        layouts: layouts of the buffers.
        gathered_again: buckets that are gathered in the compute dtype when they are cast.
    """

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        buckets: Sequence[Bucket],
        states: Sequence[BucketState],
    ) -> None:
        self._writer = writer
        self._states = states
        self._dtype = strategy.train.precision.compute
        self.places = dict[str, View]()
        self.layouts: list[Layout] = []
        self.gathered_again = set[int]()
        self._casts: dict[int, tuple[str, str, int]] = {}
        self._turned: dict[int, tuple[str, int]] = {}
        narrow = narrow_of(model, strategy)
        if narrow is None:
            return
        self._narrow = narrow
        self._weights = strategy.narrow_weights
        members = {each.name: each for each in model.parameters if each.float8}
        for bucket in buckets:
            named = [piece.parameter for piece in bucket.layout.pieces]
            if own := [members[name] for name in named if name in members]:
                self._declare(bucket, own)

    def _declare(self, bucket: Bucket, own: Sequence[Parameter]) -> None:
        """Declare the persistent buffers of a bucket's weights."""
        if self._weights is NarrowWeights.KEPT:
            self._declare_turned(bucket, own)
            return
        if self._weights is NarrowWeights.CAST_FROM_SHARDS:
            self.gathered_again.add(bucket.index)
        writer, name = self._writer, f"{bucket.name}/narrow"
        layout = in_order(name, own)
        self.layouts.append(layout)
        writer.buffer(name, layout.elements, DType.FP8, Kind.WORKSPACE, layout=name)
        writer.persist(name)
        self.places |= {
            piece.parameter: View(buffer=name, start=piece.start, size=piece.size)
            for piece in layout.pieces
        }
        rest, beside = rest_bytes(self._narrow, own), ""
        if rest:
            beside = writer.buffer(f"{name}/other", rest, DType.INT8, Kind.WORKSPACE)
            writer.persist(beside)
        self._casts[bucket.index] = name, beside, len(own)

    def _declare_turned(self, bucket: Bucket, own: Sequence[Parameter]) -> None:
        """Declare the copies along the other axis of weights that are kept in 8 bits.

        Scales do not count: there are at most two for 16,384 elements.
        """
        if self._narrow.copies == 1:
            return
        path = f"{bucket.name}/turned"
        turned = self._writer.buffer(path, bucket.padded, DType.FP8, Kind.WORKSPACE)
        self._turned[bucket.index] = self._writer.persist(turned), len(own)

    def whole(self, bucket: Bucket) -> str:
        """Return the buffer of gathered weights, which are cast and freed at once."""
        return bucket.buffer(self._writer, "gathered", self._dtype, home=COMMUNICATION)

    def write(self, bucket: Bucket, after: Iterable[Edge]) -> tuple[Edge, ...]:
        """Cast the weights of a bucket, if any; return the edges of its first reads."""
        after = tuple(after)
        writer, parameter = self._writer, self._states[bucket.index].parameter
        if bucket.index in self._turned:
            return (self._turn(bucket, parameter, after),)
        if bucket.index not in self._casts:
            return after
        if bucket.index in self.gathered_again:
            parameter = self.whole(bucket)
        target, beside, count = self._casts[bucket.index]
        path = f"narrow/{bucket.name}"
        if self._narrow.recipe in MEASURED:
            after = (self._measure(path, bucket, after),)
        copied = writer.copy(
            path, parameter, target, by_parameter=True, launches=count, after=after
        )
        if beside:
            writer.fill(f"{path}/other", beside, 0.0)
        if bucket.index in self.gathered_again:
            writer.free(parameter, uses=(copied,))
        return (copied,)

    def _turn(self, bucket: Bucket, parameter: str, after: tuple[Edge, ...]) -> str:
        """Copy the weights of a bucket along their other axis (`post_all_gather_processing`)."""
        turned, count = self._turned[bucket.index]
        path = f"turn/{bucket.name}"
        return self._writer.copy(path, parameter, turned, launches=count, after=after)

    def _measure(self, path: str, bucket: Bucket, after: tuple[Edge, ...]) -> str:
        """Measure the largest magnitude of each weight of a bucket on this rank."""
        # nvte_compute_amax of quantize_impl: weights are not reduced over the tensor ranks
        writer, parameter = self._writer, self._states[bucket.index].parameter
        own = [piece for piece in bucket.layout.pieces if piece.parameter in self.places]
        largest = writer.buffer(f"{path}/amax", len(own), DType.FP32, Kind.WORKSPACE)
        writer.allocate(largest)
        elements = sum(piece.size for piece in own)
        dtype = self._dtype
        done = writer.compute(
            f"{path}/amax",
            Action.AMAX,
            [
                *(
                    (Role.PARAMETER, View(buffer=parameter, start=each.start, size=each.size))
                    for each in own
                ),
                (Role.OUTPUT, writer.all(largest)),
            ],
            after=after,
            kernels=(streaming(KernelKind.ELEMENTWISE, (elements,), dtype, streams=1),),
        )
        writer.free(largest)
        return done


def narrow_of(model: Model, strategy: Strategy) -> NarrowProducts | None:
    """Return the narrow products whose weights are cast outside segments; None without any."""
    execution = strategy.execution if model.architecture is None else model.architecture.execution
    if execution.recipe is None:
        return None
    narrow = NarrowProducts(
        recipe=execution.recipe, quantizer=execution.quantizer, any_layout=execution.any_layout
    )
    return narrow if narrow.joins_casts else None


def narrow_buckets(model: Model, buckets: Buckets) -> frozenset[int]:
    """Return the buckets that hold weights of narrow GEMMs."""
    named = {each.name for each in model.parameters if each.float8}
    return frozenset(
        bucket.index
        for bucket in buckets.all
        if any(piece.parameter in named for piece in bucket.layout.pieces)
    )


def in_order(name: str, parameters: Iterable[Parameter]) -> Layout:
    """Return a layout of consecutive parameters without gaps."""
    pieces: list[Piece] = []
    end = 0
    for each in parameters:
        pieces.append(Piece(parameter=each.name, start=end, size=each.elements))
        end += each.elements
    return Layout(name=name, pieces=tuple(pieces), elements=end)


def rest_bytes(narrow: NarrowProducts, weights: Iterable[Parameter]) -> int:
    """Return the bytes of all copies of weights and their scales, beyond one for each element."""
    total = 0
    for each in weights:
        rows, columns = each.shape
        stored = narrow.stored_bytes(rows, columns, copies=narrow.copies, weight=True)
        total += stored - each.elements
    return total
