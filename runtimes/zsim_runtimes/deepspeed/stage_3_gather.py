"""Parameters in ZeRO-3: gathered several at once, copied out one by one, freed or kept.

Shards of several parameters are concatenated, gathered into a flat buffer, rank by rank, and copied
into whole parameters when the first of them is needed. A single parameter is gathered directly.
Here the concatenated shards are separate from the flat buffer; in DeepSpeed they are in the rank's
slot of it, which saves one rank's part. With secondary shards (hpZ), a freed parameter leaves one
on the device, and until the update it is gathered from those of the inner ranks.

Functions named in comments are from DeepSpeed 0.19, of `PartitionedParameterCoordinator` in
`runtime/zero/partitioned_param_coordinator.py` unless another file of that folder is named.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.schedule.layout import Layout
from zsim.schedule.operation import Edge, FreeMode, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.zero.bucket import Bucket
from zsim.zero.gather import AfterUpdate
from zsim.zero.names import DATA, INNER
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.deepspeed.filed_parameters import FiledParameters
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.deepspeed.stage_3_shards import Shards, flat_buffers
from zsim_runtimes.deepspeed.stage_3_trace import Fetch

FETCHES_IN_FLIGHT = 2
"""Number of unfinished fetches with which the host continues."""


@dataclass(slots=True)
class _InFlight:
    """Parameters of one gather, and the flat buffer until they are copied out of it."""

    numbers: tuple[int, ...]
    flat: str | None


class CoalescedGathers(StepPart):
    """Whole parameters, gathers in flight, and parameters with a secondary shard.

    `layouts` are those of flat buffers and secondary shards, in order of first use.
    """

    def __init__(self, step: Step, shards: Shards, *, stream: str, updated: str) -> None:
        super().__init__(step)
        self.shards = shards
        self.stream = stream
        self._mode = FreeMode.WAITED if stream == COMPUTE else FreeMode.DEFERRED
        self.layouts: list[Layout] = []
        self._pending: dict[int, _InFlight] = {}
        self._events: deque[str] = deque()
        self._latest = ""
        self._waited = ""
        self._flats: dict[tuple[tuple[int, ...], str], str] = {}
        self._secondary: dict[int, tuple[str, ...]] = {}
        self._updated = updated
        self._after_update = AfterUpdate(updated)
        self._fetches = step.strategy.options(DeepSpeed).offload_param.is_on
        self.files = FiledParameters(step, shards)

    def whole(self, number: int) -> str:
        """Return the buffer of a whole parameter, with its padding."""
        bucket = self.shards.bucket(number)
        layout = bucket.plain
        return bucket.buffer(self.writer, "whole", self.compute, home=self.stream, layout=layout)

    def fetch(self, needs: Sequence[int], fetch: Fetch) -> tuple[Edge, ...]:
        """Gather needed parameters, wait, gather ahead; return the edges that compute waits for."""
        # fetch_sub_module, in this order: the current stream waits for the whole gather stream
        self._gather(fetch.needed)
        self._wait(needs)
        found = (self._latest,) if self._latest != self._waited else ()
        self._waited = self._latest
        self._gather(fetch.ahead)
        self.files.read(fetch.read)
        return found

    def _gather(self, numbers: Sequence[int]) -> None:
        """Gather parameters with secondary shards in one gather, and all others in another."""
        # __all_gather_params_: partitioned_params_with_secondary_tensors first
        self.files.ensure(numbers)
        among = {number: INNER if number in self._secondary else DATA for number in numbers}
        for axis in (INNER, DATA):
            own = tuple(number for number in numbers if among[number] == axis)
            if len(own) == 1:
                self._gather_one(own[0], axis, self._after_update.take())
            elif own:
                self._gather_several(own, axis)

    def _gather_one(self, number: int, axis: str, after: tuple[Edge, ...]) -> None:
        # all_gather_coalesced (partition_parameters.py): "have an opportunity to avoid some
        # intermediate memory allocations" for one parameter
        bucket, whole = self.shards.bucket(number), self.whole(number)
        self.writer.allocate(whole)
        source = self._kept(number)
        if axis == INNER:
            source = self.writer.all(_secondary(bucket))
        elif self._fetches:
            source, after = self._fetch_shard(number, after), ()
        self._all_gather(bucket.name, axis, source, whole, after=after)
        if axis == DATA and self._fetches:
            self.writer.free(source.buffer)
        self._pending[number] = _InFlight((number,), None)
        if axis == INNER:
            self._secondary[number] = (self._latest,)

    def _gather_several(self, numbers: tuple[int, ...], axis: str) -> None:
        # all_gather_coalesced (partition_parameters.py): shards are concatenated in the order of
        # `ds_id`, because an order that differs between ranks would mix data
        writer, name = self.writer, self._flat(numbers, axis)
        flat, source = f"{name}/flat", f"{name}/shard"
        writer.allocate(flat, source)
        if axis == DATA and self._fetches:
            self._fetch_together(numbers, name, source)
            parts = []
        elif axis == INNER:
            parts = [_secondary(self.shards.bucket(number)) for number in numbers]
        else:
            groups = {self.shards.where[number][0] for number in numbers}
            parts = [self.states[group].parameter for group in sorted(groups)]
        after, stream = self._after_update.take() if parts else (), self.stream
        for index, part in enumerate(parts):
            path = f"put_together/{name}/{part}"
            copied = writer.copy(path, part, source, stream=stream, after=after, by_parameter=True)
            after = ()
            if axis == INNER:
                self._secondary[numbers[index]] = (copied,)
        self._all_gather(name, axis, writer.all(source), flat, after=())
        writer.free(source)
        self._pending |= dict.fromkeys(numbers, _InFlight(numbers, flat))

    def _kept(self, number: int) -> View:
        """Return a parameter's shard where it is kept, or in the slot that it was read to."""
        if (source := self.files.source(number)) is not None:
            return source
        return self.shards.shard(number, self.states[self.shards.where[number][0]].parameter)

    def _fetch_shard(self, number: int, after: tuple[Edge, ...]) -> View:
        """Copy a parameter's shard from the host; the host waits, although the memory is pinned."""
        # all_gather_coalesced (partition_parameters.py): `ds_tensor.to(device)`, not non_blocking
        writer, bucket, stream = self.writer, self.shards.bucket(number), self.stream
        kind = Kind.COMMUNICATION
        name = writer.buffer(
            f"{bucket.name}/fetched", bucket.shard, self.compute, kind, home=stream
        )
        writer.allocate(name)
        path = f"fetch/{bucket.name}"
        copied = writer.copy(path, self._kept(number), name, stream=stream, after=after)
        writer.host_wait(f"{path}/wait", copied)
        self.files.fetched(number, copied)
        return writer.all(name)

    def _fetch_together(self, numbers: Sequence[int], name: str, target: str) -> None:
        """Copy the shards of several parameters from the host into one contiguous buffer."""
        start = 0
        for number in numbers:
            fetched = self._fetch_shard(number, self._after_update.take())
            place = View(buffer=target, start=start, size=fetched.size)
            path = f"put_together/{name}/{fetched.buffer}"
            self.writer.copy(path, fetched, place, stream=self.stream)
            self.writer.free(fetched.buffer)
            start += fetched.size

    def _all_gather(
        self, name: str, axis: str, source: View, target: str, *, after: tuple[Edge, ...]
    ) -> None:
        path, stream = f"gather/{name}", self.stream
        self._latest = self.writer.all_gather(
            path, axis, source, target, stream=stream, after=after
        )

    def _flat(self, numbers: tuple[int, ...], axis: str) -> str:
        """Return the name of a gather, the prefix of its `flat` and `shard` buffers."""
        key = (numbers, axis)
        if key not in self._flats:
            name = self._flats[key] = f"gather{len(self._flats)}"
            layout = self.shards.together(name, numbers, axis)
            self.layouts.append(layout)
            ranks = self.strategy.parallel.data if axis == DATA else self.strategy.inner
            assert ranks is not None
            names = (f"{name}/flat", f"{name}/shard")
            flat_buffers(
                self.writer, layout, names, ranks=ranks, dtype=self.compute, home=self.stream
            )
        return self._flats[key]

    def _wait(self, needs: Sequence[int]) -> None:
        """Copy out the parameters gathered together with the needed ones.

        An event is recorded even if another parameter of the gather has copied them out already.
        """
        found = [self._pending.pop(number) for number in needs if number in self._pending]
        if not found:
            return
        # fetch_sub_module: more than __max_ongoing_fetch_events make the host wait for the oldest
        if len(self._events) > FETCHES_IN_FLIGHT:
            self.writer.host_wait("host_wait/fetch", self._events.popleft())
        for each in found:
            if each.flat is not None:
                self._copy_out(each.numbers, each.flat)
                each.flat = None
        self._events.append(self._latest)

    def _copy_out(self, numbers: Sequence[int], flat: str) -> None:
        # AllGatherCoalescedHandle.wait (partition_parameters.py): one torch.cat for each parameter
        for number in numbers:
            whole, path = self.whole(number), f"copy_out/{self.shards.bucket(number).name}"
            self.writer.allocate(whole)
            self._latest = self.writer.copy(
                path, flat, whole, stream=self.stream, by_parameter=True
            )
        self.writer.free(flat)

    def release(self, numbers: Sequence[int], used: str) -> None:
        """Free whole parameters, which `used` read last; with hpZ, keep a secondary shard."""
        # __release_param; free_param (partition_parameters.py) records the stream
        self.files.release(numbers)
        for number in numbers:
            last = used if self.strategy.inner is None else self._keep(number)
            self.writer.free(self.whole(number), uses=(last,), mode=self._mode)

    def _keep(self, number: int) -> str:
        """Copy the secondary shard, rewritten each time; the host waits. Return the copy."""
        # _partition_param_sec (partition_parameters.py), which ends with a synchronize
        writer, bucket, inner = self.writer, self.shards.bucket(number), self.strategy.inner
        assert inner is not None
        name = _secondary(bucket)
        layout = bucket.over_inner("secondary")
        if name not in writer.buffers:
            self.layouts.append(layout)
            bucket.inner_buffer(writer, layout, inner, self.compute, home=COMPUTE)
        if name not in writer.alive:
            writer.allocate(name)
            self._secondary[number] = ()
        own = View(buffer=self.whole(number), size=bucket.padded // inner, axis=INNER)
        kept = writer.copy(f"keep/{bucket.name}", own, name)
        writer.host_wait(f"host_wait/{bucket.name}", kept)
        return kept

    def setup_persistent(self) -> None:
        """Gather the persistent parameters for the first step; allocate empty ones for good."""
        # Marked by mark_persistent_parameters (parameter_offload.py).
        for number in self.shards.persistent:
            self.writer.persistent.append(self.whole(number))
            if self.shards.bucket(number).elements:
                group = self.shards.groups.all[self.shards.where[number][0]]
                made = self.files.initialized.get(
                    number, f"setup/{group.name}/initialize/parameter"
                )
                if self._fetches:
                    self.writer.host_wait(f"wait/{self.shards.bucket(number).name}", made)
                self._gather_persistent(number, made)
            else:
                self.writer.allocate(self.whole(number))
        self._latest = ""

    def free_persistent(self, used: str) -> None:
        """Free persistent parameters too, before the update."""
        for number in self._not_empty():
            self.writer.free(self.whole(number), uses=(used,), mode=self._mode)

    def end_step(self) -> None:
        """Gather persistent parameters after the update, one by one; free secondary shards."""
        # _post_step (stage3.py): all_gather of `persistent_parameters`, invalidate_secondary_tensor
        latest = self._latest
        for number in self._not_empty():
            self._gather_persistent(number, self._updated)
        if self._latest != latest:
            self.writer.host_wait("host_wait", self._latest)
        for number, uses in self._secondary.items():
            self.writer.free(_secondary(self.shards.bucket(number)), uses=uses)

    def _not_empty(self) -> list[int]:
        return [n for n in self.shards.persistent if self.shards.bucket(n).elements]

    def _gather_persistent(self, number: int, after: str) -> None:
        self._gather_one(number, DATA, (after,))
        del self._pending[number]


def _secondary(bucket: Bucket) -> str:
    return f"{bucket.name}/secondary"
