"""Gradients in DeepSpeed's stages 1 and 2: buckets, all-reduced; a rank keeps its part."""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.schedule.operation import AllReduce, Copy, Edge, Fill, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket
from zsim.zero.reduce import Reduced
from zsim.zero.writer import COMPUTE, DATA, Draft

REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter in the bucket: its flat tensor, where it begins there and in the bucket."""

    flat: Bucket
    start: int
    offset: int
    size: int


class Reductions:
    """The bucket that gradients are copied into; two that take turns if reductions overlap.

    It takes gradients of all flat tensors, of which there is one for each group of parameters.
    """

    def __init__(
        self, draft: Draft, strategy: Strategy, options: DeepSpeed, *, flats: Sequence[Bucket]
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.options = options
        self.flats = flats
        self.reduced: dict[int, Reduced] = {}
        self._done = ""
        self._stream = REDUCTION if options.overlap_comm else COMPUTE
        self._compute = strategy.precision.compute
        self._wire = options.communication_data_type or self._compute
        self._members: list[Member] = []
        self._flushed = 0
        self._copied = ""
        self._waits: tuple[Edge, ...] = ()

    def begin(self) -> None:
        """Take the memory of the buckets and of the rank's part."""
        self._flushed = 0
        for index in range(2 if self.options.overlap_comm else 1):
            self.draft.allocate(self._ipg(index))
        for flat in self.flats:
            owned = self._owned(flat)
            self.draft.allocate(owned)
            size = flat.padded - flat.elements
            if size:
                padding = View(buffer=owned, start=flat.elements, size=size, layout=flat.name)
                path = self.draft.path(f"pad/{owned}")
                self.draft.add(Fill(id=path, stream=self._stream, target=padding, value=0.0))

    def _ipg(self, index: int) -> str:
        """A bucket, taken whole ("independent parallel gradients" in DeepSpeed's words)."""
        size = self.options.reduce_bucket_size
        return self.draft.buffer(f"ipg{index}", size, self._compute, Kind.COMMUNICATION)

    def _owned(self, flat: Bucket) -> str:
        return self.draft.buffer(
            f"{flat.name}/owned",
            flat.shard,
            self._compute,
            Kind.GRADIENT,
            home=self._stream,
            layout=flat.name,
            shard=DATA,
        )

    def add(self, name: str, source: View, flat: Bucket, start: int, *, divisor: int) -> None:
        """Copy the gradient that begins at `start` of a flat tensor into the bucket.

        One that is larger than the bucket is reduced alone.
        """
        draft, limit = self.draft, self.options.reduce_bucket_size
        offset = sum(member.size for member in self._members)
        if self._members and offset + source.size > limit:
            self._flush()
            offset = 0
        if source.size > limit:
            self._reduce([Member(flat, start, 0, source.size)], source, divisor, stream=COMPUTE)
            return
        target = View(
            buffer=self._ipg(self._flushed % 2 if self.options.overlap_comm else 0),
            start=offset,
            size=source.size,
        )
        self._copied = draft.add(
            Copy(
                id=draft.path(f"bucket/{name}"),
                stream=COMPUTE,
                after=self._waits,
                source=source,
                target=target,
                divisor=divisor,
            )
        )
        self._waits = ()
        self._members.append(Member(flat, start, offset, source.size))

    def _flush(self) -> None:
        """Reduce the bucket and keep what the rank owns of it."""
        if not self._members:
            return
        index = self._flushed % 2 if self.options.overlap_comm else 0
        size = sum(member.size for member in self._members)
        members, self._members = self._members, []
        self._reduce(members, View(buffer=self._ipg(index), size=size), 1, stream=self._stream)

    def _reduce(self, members: list[Member], source: View, divisor: int, *, stream: str) -> None:
        """Divide on `stream` into a tensor of its own, all-reduce it, and keep what is owned."""
        draft, number = self.draft, self._flushed
        overlaps = self.options.overlap_comm
        # The reduction before this one has read the bucket that is filled next.
        self._waits = (self._done,) if overlaps and number else ()
        self._flushed += 1
        flat = draft.buffer(
            f"flat{number}", source.size, self._wire, Kind.COMMUNICATION, home=stream
        )
        draft.allocate(flat)
        divided = draft.add(
            Copy(
                id=draft.path(f"divide{number}"),
                stream=stream,
                after=(self._copied,) if stream != COMPUTE else (),
                source=source,
                target=draft.all(flat),
                divisor=divisor * self.strategy.data,
            )
        )
        done = draft.add(
            AllReduce(
                id=draft.path(f"reduce{number}"),
                stream=self._stream,
                after=(divided,) if stream != self._stream else (),
                group=DATA,
                source=draft.all(flat),
                target=draft.all(flat),
                wire=self._wire,
                accumulate=self._wire,
            )
        )
        for position, member in enumerate(members):
            done = self._keep(flat, member, f"keep{number}/{position}")
        draft.free(flat, (done,) if stream != self._stream else ())
        self._done = done
        self.reduced = {each.index: Reduced(self._owned(each), done) for each in self.flats}

    def _keep(self, flat: str, member: Member, name: str) -> str:
        """Copy what the rank owns of a reduced gradient: all, a part, or nothing."""
        start, size, layout = member.start, member.size, member.flat.name
        return self.draft.add(
            Copy(
                id=self.draft.path(name),
                stream=self._stream,
                source=View(
                    buffer=flat, start=start, size=size, layout=layout, origin=member.offset
                ),
                target=View(buffer=self._owned(member.flat), start=start, size=size, layout=layout),
            )
        )

    def finish(self, *, last: bool) -> None:
        """Reduce what is left, and give the buckets back; add to earlier micro-batches."""
        draft = self.draft
        self._flush()
        done = self._done
        uses = (done,) if self.options.overlap_comm else ()
        if self.options.overlap_comm:
            draft.host_wait(done)
        for index in range(2 if self.options.overlap_comm else 1):
            draft.free(self._ipg(index), uses)
        self._waits = ()
        if self.strategy.stage == 2 and self.strategy.gradient_accumulation_steps > 1:
            for flat in self.flats:
                self._add_up(flat, done, last=last)

    def _add_up(self, flat: Bucket, done: str, *, last: bool) -> None:
        """The rank's part over all micro-batches, in the format of the optimizer."""
        draft, owned = self.draft, self._owned(flat)
        total = draft.buffer(
            f"{flat.name}/gradient",
            flat.shard,
            self.strategy.precision.optimizer,
            Kind.GRADIENT,
            layout=flat.name,
            shard=DATA,
        )
        first = total not in draft.alive
        if first:
            draft.allocate(total)
        added = draft.add(
            Copy(
                id=draft.path(f"accumulate/{flat.name}"),
                stream=COMPUTE,
                after=(done,) if self._stream != COMPUTE else (),
                source=draft.all(owned),
                target=draft.all(total),
                accumulate=not first,
            )
        )
        draft.free(owned, (added,) if self._stream != COMPUTE else ())
        if last:
            self.reduced[flat.index] = Reduced(total, added)
