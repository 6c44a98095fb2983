"""ZeRO-Infinity: parameter shards are fetched from the host, or from NVMe through the host.

Rajbhandari et al. 2021, section 5.1 (bandwidth-centric partitioning): every rank fetches its own
shard over its own link, and the all-gather combines them. Section 6.2 (overlap-centric): while a
unit computes, the next is gathered, the shard of the one after it is copied to the device, and the
one after that is read from NVMe. Options set how far ahead each of these runs.
"""

from collections.abc import Sequence

from zsim.schedule.operation import Previous
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import FROM_HOST, NVME_READ, ScheduleWriter
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.state import BucketState, update_path
from zsim.zero.visit_order import Need

SLOTS = "parameter_slots"
"""The pool of host slots that shards from NVMe are read into."""


class FetchedShards:
    """Copies shards to the device ahead of the gathers that read them."""

    def __init__(
        self,
        writer: ScheduleWriter,
        strategy: Strategy,
        *,
        buckets: Buckets,
        states: Sequence[BucketState],
        needs: Sequence[Need],
    ) -> None:
        self._writer = writer
        self._strategy = strategy
        self._buckets = buckets
        self._states = states
        self._needs = needs
        self._read: list[str] = []
        self._fetched = 0
        self._copies: dict[str, str] = {}
        self._read_now: set[str] = set()
        self._shard = max([1, *(bucket.shard for bucket in buckets.all)])
        self._updated: set[int] = set()
        self._from_nvme = strategy.offload.parameters is MemoryTier.NVME

    def advance(self, index: int) -> None:
        """Read and copy the shards for visit `index`, and for the visits ahead of it."""
        offload = self._strategy.offload
        reach = index + self._strategy.zero.prefetch_units + offload.fetch_units
        self._read_now.clear()
        for need in self._needs[self._fetched :]:
            if need.first > reach or self._name(need) in self._writer.alive:
                break
            if self._from_nvme:
                self._read_ahead(self._fetched, reach + offload.read_units)
            self._copies[self._name(need)] = self._fetch(self._fetched, need)
            self._fetched += 1
        if self._from_nvme:
            self._read_ahead(self._fetched - 1, reach + offload.read_units)

    def take(self, need: Need) -> tuple[str, str]:
        """Return the device buffer of the shard that `need` gathers, and the copy that fills it."""
        return self._name(need), self._copies[self._name(need)]

    def end(self) -> None:
        """Declare the pool of slots, with the largest number that were used at once."""
        size_bytes = self._shard * self._strategy.train.precision.compute.size_bytes
        if self._read:
            self._writer.slots(SLOTS, size_bytes, self._writer.peak_bytes[SLOTS] // size_bytes)

    @staticmethod
    def _name(need: Need) -> str:
        return f"{need.buffer}/fetched"

    @staticmethod
    def _slot(need: Need) -> str:
        return f"{need.buffer}/slot"

    def _read_ahead(self, now: int, reach: int) -> None:
        """Read shards up to need number `now`, and further ones that visits up to `reach` need."""
        for number in range(len(self._read), len(self._needs)):
            need = self._needs[number]
            again = self._slot(need) in self._read_now or self._slot(need) in self._writer.alive
            if number > now and (need.first > reach or again):
                break
            self._read_now.add(self._slot(need))
            writer, bucket = self._writer, self._buckets.all[need.bucket]
            slot = writer.buffer(
                self._slot(need),
                self._shard,
                self._strategy.train.precision.compute,
                Kind.PARAMETER,
                pool=SLOTS,
                home=NVME_READ,
            )
            writer.allocate(slot)
            kept = self._states[need.bucket].parameter
            target = writer.part(slot, bucket.shard)
            path = f"read/{need.buffer}"
            self._read.append(
                writer.read(path, kept, target, stream=NVME_READ, after=self._after_update(need))
            )

    def _fetch(self, number: int, need: Need) -> str:
        """Copy the shard to the device; return the copy."""
        writer, bucket = self._writer, self._buckets.all[need.bucket]
        name = need.buffer.removeprefix(f"{bucket.name}/")
        compute = self._strategy.train.precision.compute
        shard = bucket.shard_buffer(writer, f"{name}/fetched", compute, home=FROM_HOST)
        path = f"fetch/{need.buffer}"
        if not self._from_nvme:
            writer.allocate(shard)
            kept = self._states[need.bucket].parameter
            after = self._after_update(need)
            return writer.copy(path, kept, shard, stream=FROM_HOST, after=after)
        read, slot = self._read[number], self._slot(need)
        writer.host_wait(f"{path}/wait", read)
        writer.allocate(shard)
        source = writer.part(slot, bucket.shard)
        copied = writer.copy(path, source, shard, stream=FROM_HOST, after=(read,))
        writer.free(slot, uses=(copied,))
        return copied

    def _after_update(self, need: Need) -> tuple[Previous, ...]:
        """Return the edge of a step's first read, from the previous step's update."""
        bucket = self._buckets.all[need.bucket]
        if bucket.frozen or need.bucket in self._updated:
            return ()
        self._updated.add(need.bucket)
        return (Previous(update_path(bucket, self._strategy)),)
