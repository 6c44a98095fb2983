"""ZeRO-1's gather in nanotron: it takes lists of tensors, which are copied one by one.

It is given a part of each parameter for each rank. What arrives in a flat tensor is copied out of
it part by part.
"""

from zsim.dtype import DType
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.bucket import Bucket
from zsim.zero.names import DATA
from zsim.zero.state import own_view
from zsim.zero.step_skeleton import StepPart

GATHER = "step/update/gather"


class Lists(StepPart):
    """Writes this collective."""

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
