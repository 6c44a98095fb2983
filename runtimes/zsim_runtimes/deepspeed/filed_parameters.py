"""Parameters of DeepSpeed's stage 3 with shards in files: read through slots to the device.

A shard is read into a separate slot, which it holds until its parameter is freed. A gather waits
for all reads in flight if it needs one of them. Shards too small for a file stay in host memory.

Functions named in comments are from DeepSpeed 0.19, of `AsyncPartitionedParameterSwapper` in
`runtime/swap_tensor/partitioned_param_swapper.py` unless another file is named.
"""

from collections.abc import Iterator, Sequence

from zsim.model.model import ModelError
from zsim.schedule.operation import Action, FreeMode, Previous, Role, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import (
    CPU,
    HOST_POOL,
    NVME_READ,
    NVME_WRITE,
    ScheduleWriter,
)
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.deepspeed.stage_3_shards import Shards

PARAMETER_SLOTS = "parameter_slots"
"""The pool of slots for shards of parameters."""


class FiledParameters(StepPart):
    """Slots of shards, reads in flight, and shards that are too small for a file."""

    def __init__(self, step: Step, shards: Shards) -> None:
        super().__init__(step)
        self.shards = shards
        self._param = step.strategy.options(DeepSpeed).offload_param
        self._small = frozenset(shards.outside_files)
        self._reads: dict[int, str] = {}
        self._copies: dict[int, str] = {}
        self._last = ""
        self.initialized: dict[int, str] = {}
        largest = max((shards.bucket(number).shard for number in shards.filed), default=0)
        if largest > self._param.buffer_size:
            raise ModelError(
                f"zero.deepspeed.offload_param.buffer_size: {self._param.buffer_size} must be at "
                f"least {largest}, the elements of the largest shard"
            )

    def write_setup(self) -> None:
        """Declare the slots, and fill the shards that are too small for a file."""
        if not self.shards.filed:
            return
        size_bytes = self._param.buffer_size * self.compute.size_bytes
        self.writer.slots(PARAMETER_SLOTS, size_bytes, self._param.buffer_count)
        for number in sorted(self._small):
            name = self.writer.persist(self._small_buffer(number))
            operands = [(Role.PARAMETER, self.writer.all(name))]
            path = f"initialize/{name}"
            self.initialized[number] = self.writer.compute(
                path, Action.INITIALIZE, operands, stream=CPU
            )

    def _small_buffer(self, number: int) -> str:
        bucket, kind = self.shards.bucket(number), Kind.PARAMETER
        return bucket.shard_buffer(
            self.writer, "beside_files", self.compute, kind, pool=HOST_POOL, home=CPU
        )

    def source(self, number: int) -> View | None:
        """Return a shard in its slot or in host memory; None if neither holds it."""
        if number in self.shards.filed:
            return self.writer.part(self._slot(number), self.shards.bucket(number).shard)
        if number in self._small:
            return self.writer.all(self._small_buffer(number))
        return None

    def _slot(self, number: int) -> str:
        return self.writer.buffer(
            f"{self.shards.bucket(number).name}/slot",
            self._param.buffer_size,
            self.compute,
            Kind.PARAMETER,
            pool=PARAMETER_SLOTS,
            home=NVME_READ,
        )

    def read(self, numbers: Sequence[int]) -> None:
        """Read shards into slots."""
        # swap_in
        for number in numbers:
            slot, bucket = self._slot(number), self.shards.bucket(number)
            group, _ = self.shards.where[number]
            self.writer.allocate(slot)
            file = self.shards.shard(number, self.states[group].parameter)
            written = f"step/update/{self.shards.groups.all[group].name}/write/{bucket.name}"
            self._last = self._reads[number] = self.writer.read(
                f"read/{bucket.name}",
                file,
                self.writer.part(slot, bucket.shard),
                stream=NVME_READ,
                after=() if self.shards.groups.all[group].frozen else (Previous(written),),
            )

    def ensure(self, numbers: Sequence[int]) -> None:
        """Read missing shards, and wait for all reads if one of them is needed."""
        # as _ensure_availability_of_partitioned_params in runtime/zero/partition_parameters.py
        filed = [number for number in numbers if number in self.shards.filed]
        self.read([number for number in filed if number not in self._reads])
        if any(self._reads[number] for number in filed):  # synchronize_reads
            self.writer.host_wait(f"read/wait/{self._last}", self._last)
            self._reads = dict.fromkeys(self._reads, "")

    def fetched(self, number: int, copied: str) -> None:
        """Record the copy of a shard to the device, the last use of its slot."""
        self._copies[number] = copied

    def release(self, numbers: Sequence[int]) -> None:
        """Free the slots of parameters that are freed."""
        # remove_partition_and_release_buffers
        for number in numbers:
            if number in self._reads:
                del self._reads[number]
                uses = (self._copies.pop(number),)
                self.writer.free(self._slot(number), uses=uses, mode=FreeMode.HOST)

    def write_back(self, writer: ScheduleWriter, group: str, landing: str, updated: str) -> None:
        """Move updated parameters of a sub-group to files or host memory; the host waits."""
        # as _partitioned_params_swap_out in runtime/zero/stage3.py, swap_out_partitioned_params
        waits: dict[str, str] = {}
        for number, start in self._members(group):
            bucket = self.shards.bucket(number)
            view = View(buffer=landing, start=start, size=bucket.shard)
            if number in self.shards.filed:
                index, _ = self.shards.where[number]
                file = self.shards.shard(number, self.states[index].parameter)
                path, after = f"write/{bucket.name}", (updated,)
                waits["write"] = writer.write_file(path, view, file, stream=NVME_WRITE, after=after)
            else:
                target = self._small_buffer(number)
                waits["keep"] = writer.copy(f"keep/{bucket.name}", view, target, stream=CPU)
        for name, operation in waits.items():
            writer.host_wait(f"{name}/wait", operation)

    def _members(self, group: str) -> Iterator[tuple[int, int]]:
        for number, (index, start) in enumerate(self.shards.where):
            if self.shards.groups.all[index].name == group and self.shards.bucket(number).elements:
                yield number, start
