"""Gradients in ZeRO-3: into one bucket in the order of backward, reduced whenever it is full.

As `deepspeed/runtime/zero/stage3.py` does it (DeepSpeed 0.19). All of it is on one stream, so one
bucket suffices. What fills it is put together rank by rank, each parameter padded, divided by the
ranks, reduce-scattered, and set in the gradients of the sub-groups, or added from the second
micro-batch on. The bucket has `reduce_bucket_size` elements whatever the model, from set-up on. A
gradient that is larger is reduced out of its own memory. What is received stands beside what was
put together, in DeepSpeed in the rank's slot of it.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.runtimes.deepspeed.stage_3_shards import Shards
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Copy, Fill, FreeMode, ReduceScatter, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket
from zsim.zero.forward_backward import Passes
from zsim.zero.writer import COMPUTE, DATA, Draft

REDUCTIONS_IN_FLIGHT = 2
"""Unfinished reductions with which the host goes on (`max_param_reduce_events`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """What is reduced at once.

    Attributes:
        name: of the layout in which it is put together.
        numbers: parameters, in the order of backward.
        bucket: the buffer that is filled; None for one gradient that is too large for it.
    """

    name: str
    numbers: tuple[int, ...]
    bucket: str | None


class Reductions:
    """Takes the gradients of each unit's backward, fills the bucket and reduces it."""

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        options: DeepSpeed,
        *,
        shards: Shards,
        passes: Passes,
        stream: str,
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.shards = shards
        self.passes = passes
        self.stream = stream
        self._mode = FreeMode.WAITED if stream == COMPUTE else FreeMode.DEFERRED
        self.micro_batch = 0
        self.finished = ""
        self.layouts: list[Layout] = []
        self._wire = options.communication_data_type or strategy.precision.compute
        self._runs = [
            shards.parameters.trained_runs(unit) for unit in range(len(shards.parameters.runs))
        ]
        self._uses = Counter(run.bucket for runs in self._runs for _, run in runs)
        self._left = Counter(self._uses)
        self._sums: dict[int, str] = {}
        self._events: deque[str] = deque()
        self._fillings = self._fill(options.reduce_bucket_size)
        self._filling = {
            number: filling for filling in self._fillings for number in filling.numbers
        }
        self._starts: dict[int, int] = {}
        for filling in self._fillings:
            start = 0
            for number in filling.numbers:
                self._starts[number] = start
                start += shards.bucket(number).elements
        forms = (each.bucket for each in self._fillings if each.bucket is not None)
        self._first = next(forms, None) or self._formless(options.reduce_bucket_size)
        self._bucket = self._first
        self._open: _Filling | None = None
        self._source = ""
        self._written = ""

    def _fill(self, limit: int) -> list[_Filling]:
        """Gradients in the order in which they are complete, reduced before one is too much."""
        left = Counter(self._uses)
        found: list[list[int]] = []
        filled = limit
        for runs in reversed(self._runs):
            for _, run in reversed(runs):
                left[run.bucket] -= 1
                size = self.shards.bucket(run.bucket).elements
                if left[run.bucket] or not size:
                    continue
                if not found or filled + size > limit:
                    found.append([])
                    filled = 0
                found[-1].append(run.bucket)
                filled += size
        return [self._declare(index, numbers, limit) for index, numbers in enumerate(found)]

    def _declare(self, index: int, numbers: Sequence[int], limit: int) -> _Filling:
        """The buffers of one filling, and their layouts."""
        draft, name = self.draft, f"reduction{index}"
        together = self.shards.together(name, sorted(numbers), DATA)
        self.layouts.append(together)
        for buffer, elements, shard in (
            ("input", together.elements, None),
            ("received", together.elements // self.strategy.data, DATA),
        ):
            draft.buffer(
                f"{name}/{buffer}",
                elements,
                self._wire,
                Kind.COMMUNICATION,
                home=self.stream,
                layout=name,
                shard=shard,
            )
        bucket = None
        layout = self.shards.one_after_the_other(f"{name}/bucket", numbers)
        if layout.elements <= limit:
            self.layouts.append(layout)
            bucket = draft.buffer(
                layout.name,
                limit,
                self.strategy.precision.compute,
                Kind.COMMUNICATION,
                home=self.stream,
                layout=layout.name,
            )
        return _Filling(name=name, numbers=tuple(numbers), bucket=bucket)

    def _formless(self, limit: int) -> str:
        """The bucket where no gradient fits in."""
        return self.draft.buffer(
            "bucket",
            limit,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            home=self.stream,
        )

    def write_setup(self) -> None:
        """The bucket and the gradients of sub-groups live as long as the parameters."""
        draft = self.draft
        for group in self.shards.groups.trained:
            draft.prefix = f"setup/{group.name}"
            name = self.gradient(group)
            draft.persistent.append(name)
            draft.allocate(name)
            path = draft.path("zero/gradient")
            draft.add(Fill(id=path, stream=COMPUTE, target=draft.all(name), value=0.0))
        draft.prefix = "setup/bucket"
        draft.persistent.append(self._bucket)
        draft.allocate(self._bucket)

    def gradient(self, group: Bucket) -> str:
        """The buffer of a sub-group's gradient: the rank's shard."""
        return self.draft.buffer(
            f"{group.name}/gradient",
            group.shard,
            self.strategy.precision.compute,
            Kind.GRADIENT,
            layout=group.layout.name,
            shard=DATA,
        )

    def collect(self, unit: int, done: str) -> None:
        """Put the gradients into the bucket that backward of `unit`, which ended `done`, made."""
        draft = self.draft
        for position, run in reversed(self._runs[unit]):
            number, source = run.bucket, self.passes.transient(unit, position)
            if not self.shards.bucket(number).elements:
                draft.free(source)
                continue
            self._left[number] -= 1
            if number in self._sums:
                done = self._add_up(source, self._sums[number])
                source = self._sums[number]
            if self._left[number]:
                self._sums[number] = source
            else:
                self._sums.pop(number, None)
                self._put(number, source, done)

    def _add_up(self, source: str, target: str) -> str:
        """Autograd adds what several units contribute to one parameter."""
        draft = self.draft
        added = draft.add(
            Copy(
                id=draft.path(f"add/{target}"),
                stream=COMPUTE,
                source=draft.all(source),
                target=draft.all(target),
                accumulate=True,
            )
        )
        draft.free(source)
        return added

    def _put(self, number: int, source: str, done: str) -> None:
        draft, filling = self.draft, self._filling[number]
        if filling is not self._open:
            self._reduce()
            self._open = filling
            self._take(filling.bucket)
        if filling.bucket is None:
            self._source, self._written = source, done
            return
        copied = draft.add(
            Copy(
                id=draft.path(f"put/{self.shards.bucket(number).name}"),
                stream=self.stream,
                after=(done,),
                source=draft.all(source),
                target=View(
                    buffer=filling.bucket,
                    start=self._starts[number],
                    size=self.shards.bucket(number).elements,
                ),
                divisor=self.strategy.gradient_accumulation_steps,
            )
        )
        draft.free(source, (copied,), mode=self._mode)

    def _take(self, bucket: str | None) -> None:
        """The bucket in the form of what is filled in next: the same memory."""
        if bucket is None or bucket == self._bucket:
            return
        self.draft.free(self._bucket)
        self.draft.allocate(bucket)
        self._bucket = bucket

    def _reduce(self) -> None:
        """Reduce what is in the bucket, if something is."""
        draft, filling = self.draft, self._open
        if filling is None:
            return
        if len(self._events) > REDUCTIONS_IN_FLIGHT:
            draft.host_wait(self._events.popleft(), f"host_wait/{filling.name}")
        source, target = f"{filling.name}/input", f"{filling.name}/received"
        draft.allocate(source)
        self._put_together(filling, source)
        draft.add(
            Copy(
                id=draft.path(f"divide/{filling.name}"),
                stream=self.stream,
                source=draft.all(source),
                target=draft.all(source),
                divisor=self.strategy.data,
            )
        )
        draft.allocate(target)
        draft.add(
            ReduceScatter(
                id=draft.path(f"reduce/{filling.name}"),
                stream=self.stream,
                group=DATA,
                source=draft.all(source),
                target=draft.all(target),
                wire=self._wire,
                accumulate=self._wire,
            )
        )
        draft.free(source)
        self._settle(filling, target)
        draft.free(target)
        self._events.append(self.finished)
        self._open = None

    def _put_together(self, filling: _Filling, target: str) -> None:
        """Parts of all gradients, rank by rank."""
        draft, large = self.draft, filling.bucket is None
        copied = draft.add(
            Copy(
                id=draft.path(f"put_together/{filling.name}"),
                stream=self.stream,
                after=(self._written,) if large else (),
                source=self._filled(filling),
                target=draft.all(target),
                divisor=self.strategy.gradient_accumulation_steps if large else 1,
                by_parameter=True,
            )
        )
        if large:
            draft.free(self._source, (copied,), mode=self._mode)

    def _filled(self, filling: _Filling) -> View:
        """What is put together: what stands in the bucket, or the gradient that is too large."""
        if filling.bucket is None:
            return self.draft.all(self._source)
        size = sum(self.shards.bucket(number).elements for number in filling.numbers)
        return View(buffer=filling.bucket, size=size)

    def _settle(self, filling: _Filling, received: str) -> None:
        """Set or add what was received in the gradients of the sub-groups."""
        draft = self.draft
        groups = {self.shards.where[number][0] for number in filling.numbers}
        verb = "add" if self.micro_batch else "set"
        for group in sorted(groups):
            target = self.gradient(self.shards.groups.all[group])
            self.finished = draft.add(
                Copy(
                    id=draft.path(f"{verb}/{target}/{filling.name}"),
                    stream=self.stream,
                    source=draft.all(received),
                    target=draft.all(target),
                    accumulate=bool(self.micro_batch),
                    by_parameter=True,
                )
            )

    def end_backward(self) -> None:
        """Reduce the rest; the host waits until all is reduced."""
        self._reduce()
        self._left = Counter(self._uses)
        if self._events:
            self._events.clear()
            self.draft.host_wait(self.finished)
        self._take(self._first)
