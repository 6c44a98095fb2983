"""ZeRO-1's collectives in nanotron: they take lists of tensors, which are copied one by one.

They are given a part of each parameter for each rank. PyTorch copies each part into a flat tensor
before the collective, or out of one after it.
"""

from zsim.dtype import DType
from zsim.schedule.operation import FreeMode, Reduction
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.bucket import Bucket
from zsim.zero.names import DATA
from zsim.zero.state import own_view
from zsim.zero.step_skeleton import StepPart

GATHER = "step/update/gather"


class Lists(StepPart):
    """Writes these collectives."""

    def reduce_scatter(self, bucket: Bucket, gradient: str, after: tuple[str, ...]) -> str:
        """Average `gradient` over the data axis into the rank's own part; return the operation.

        The flat tensor comes back when the reduction is done.
        """
        # distributed.reduce_scatter_coalesced (src/nanotron, 2025-02): _flatten_dense_tensors of
        # what each rank is to get, from get_fp32_accum_hook, which does not wait
        writer = self.writer
        flat = self._flat(bucket, "flat", writer.buffers[gradient].dtype)
        writer.allocate(flat)
        launches, path = self._pieces(bucket), f"reduce/{bucket.name}"
        name = f"flatten/{bucket.name}"
        flattened = writer.copy(name, gradient, flat, launches=launches, after=after)
        own = own_view(writer, bucket, gradient)
        writer.reduce_scatter(f"{path}/member", DATA, flat, own, reduction=Reduction.AVERAGE)
        reduced = writer.together(path, 1, after=(flattened,))
        writer.free(flat, uses=(reduced,), mode=FreeMode.DEFERRED)
        return reduced

    def all_gather(self, writer: ScheduleWriter, after: str) -> str:
        """Gather what the ranks have updated, as one; return the last copy into place."""
        # distributed.all_gather_coalesced (src/nanotron, 2025-02): update_output after it
        flats = [self._flat(bucket, "gathered", self.compute) for bucket in self.buckets.all]
        pairs = tuple(zip(self.buckets.all, self.states, flats, strict=True))
        writer.allocate(*flats)
        place, writer.prefix = writer.prefix, "step/update"
        for bucket, state, flat in pairs:
            own = own_view(writer, bucket, state.parameter)
            writer.all_gather(f"gather/{bucket.name}", DATA, own, flat)
        writer.together("gather", len(pairs), after=(after,))
        last = ""
        for bucket, state, flat in pairs:
            last = writer.copy(
                f"put/{bucket.name}",
                flat,
                state.parameter,
                launches=self._pieces(bucket),
                after=() if last else (GATHER,),
            )
            writer.prefix = place
            writer.free(flat, uses=(GATHER,))
            writer.prefix = "step/update"
        writer.prefix = place
        return last

    def _flat(self, bucket: Bucket, name: str, dtype: DType) -> str:
        return bucket.buffer(self.writer, name, dtype)

    def _pieces(self, bucket: Bucket) -> int:
        return len(bucket.layout.pieces) * self.strategy.parallel.data
