"""Parameters in ZeRO-3: gathered several at once, copied out one by one, freed or kept.

Shards of several parameters are put together, gathered into a flat buffer, rank by rank, and copied
into whole parameters when the first of them is needed. A single one is gathered straight. Here the
shards that are put together stand beside the flat buffer, in DeepSpeed in the rank's slot of it:
that is one rank's part more. With secondary shards (hpZ) a parameter that is freed leaves one, and
until the update is gathered from those of the inner ranks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.runtimes.deepspeed.stage_3_shards import Shards
from zsim.runtimes.deepspeed.stage_3_trace import Fetch
from zsim.schedule.layout import Layout
from zsim.schedule.operation import AllGather, Copy, Edge, FreeMode, Previous, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket
from zsim.zero.state import BucketState
from zsim.zero.writer import COMPUTE, DATA, INNER, Draft

FETCHES_IN_FLIGHT = 2
"""Unfinished fetches with which the host goes on (`max_ongoing_fetch_events`)."""


@dataclass(slots=True)
class _OnTheWay:
    """Parameters of one gather, and the flat buffer until they are copied out of it."""

    numbers: tuple[int, ...]
    flat: str | None


class Gathers:
    """What is whole, what is on its way, and what has a secondary shard.

    `layouts` are those of flat buffers and secondary shards, as they come up.
    """

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        *,
        shards: Shards,
        states: Sequence[BucketState],
        stream: str,
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.shards = shards
        self.states = states
        self.stream = stream
        self._mode = FreeMode.WAITED if stream == COMPUTE else FreeMode.DEFERRED
        self.layouts: list[Layout] = []
        self._pending: dict[int, _OnTheWay] = {}
        self._events: deque[str] = deque()
        self._latest = ""
        self._waited = ""
        self._flats: dict[tuple[tuple[int, ...], str], str] = {}
        self._secondary: dict[int, tuple[str, ...]] = {}
        self._fresh = False

    def whole(self, number: int) -> str:
        """The buffer of a whole parameter, with its padding."""
        bucket = self.shards.bucket(number)
        return self.draft.buffer(
            f"{bucket.name}/whole",
            bucket.padded,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            home=self.stream,
            layout=bucket.plain.name,
        )

    def fetch(self, needs: Sequence[int], fetch: Fetch) -> tuple[Edge, ...]:
        """Gather what is needed, wait, then gather ahead; what the compute stream waits for."""
        self._gather(fetch.needed)
        self._wait(needs)
        found = (self._latest,) if self._latest != self._waited else ()
        self._waited = self._latest
        self._gather(fetch.ahead)
        return found

    def _gather(self, numbers: Sequence[int]) -> None:
        """One gather of all that have secondary shards, and one of all others."""
        among = {number: INNER if number in self._secondary else DATA for number in numbers}
        for axis in (INNER, DATA):
            own = tuple(number for number in numbers if among[number] == axis)
            if len(own) == 1:
                self._gather_one(own[0], axis, self._after_update())
            elif own:
                self._gather_several(own, axis)

    def _gather_one(self, number: int, axis: str, after: tuple[Edge, ...]) -> None:
        draft, bucket = self.draft, self.shards.bucket(number)
        whole = self.whole(number)
        draft.allocate(whole)
        source = self.shards.shard(number, self.states[self.shards.where[number][0]].parameter)
        if axis == INNER:
            source = draft.all(_secondary(bucket))
        self._all_gather(bucket.name, axis, source, whole, after=after)
        self._pending[number] = _OnTheWay((number,), None)
        if axis == INNER:
            self._secondary[number] = (self._latest,)

    def _gather_several(self, numbers: tuple[int, ...], axis: str) -> None:
        draft = self.draft
        name = self._flat(numbers, axis)
        flat, source = f"{name}/flat", f"{name}/shard"
        draft.allocate(flat)
        draft.allocate(source)
        if axis == INNER:
            parts = [_secondary(self.shards.bucket(number)) for number in numbers]
        else:
            groups = {self.shards.where[number][0] for number in numbers}
            parts = [self.states[group].parameter for group in sorted(groups)]
        after = self._after_update()
        for part in parts:
            copied = draft.add(
                Copy(
                    id=draft.path(f"put_together/{name}/{part}"),
                    stream=self.stream,
                    after=after,
                    source=draft.all(part),
                    target=draft.all(source),
                    by_parameter=True,
                )
            )
            after = ()
            if axis == INNER:
                self._secondary[numbers[parts.index(part)]] = (copied,)
        self._all_gather(name, axis, draft.all(source), flat)
        draft.free(source)
        self._pending |= dict.fromkeys(numbers, _OnTheWay(numbers, flat))

    def _all_gather(
        self, name: str, axis: str, source: View, target: str, *, after: tuple[Edge, ...] = ()
    ) -> None:
        self._latest = self.draft.add(
            AllGather(
                id=self.draft.path(f"gather/{name}"),
                stream=self.stream,
                after=after,
                group=axis,
                source=source,
                target=self.draft.all(target),
                wire=self.strategy.precision.compute,
            )
        )

    def _after_update(self) -> tuple[Edge, ...]:
        """The first gather of a step waits for the last update."""
        if self._fresh:
            return ()
        self._fresh = True
        return (Previous(f"step/update/{self.shards.groups.trained[-1].name}/cast"),)

    def _flat(self, numbers: tuple[int, ...], axis: str) -> str:
        """Name of the flat buffer of a gather of `numbers`, and of the shard that goes into it."""
        key = (numbers, axis)
        if key not in self._flats:
            name = self._flats[key] = f"gather{len(self._flats)}"
            layout = self.shards.together(name, numbers, axis)
            self.layouts.append(layout)
            ranks = self.strategy.data if axis == DATA else self.strategy.inner
            assert ranks is not None
            for buffer, elements, shard in (
                ("flat", layout.elements, None),
                ("shard", layout.elements // ranks, axis),
            ):
                self.draft.buffer(
                    f"{name}/{buffer}",
                    elements,
                    self.strategy.precision.compute,
                    Kind.COMMUNICATION,
                    home=self.stream,
                    layout=name,
                    shard=shard,
                )
        return self._flats[key]

    def _wait(self, needs: Sequence[int]) -> None:
        """Copy out what was gathered with the parameters that are needed.

        Also where that is done already the fetch ends with what the stream has to do by now.
        """
        found = [self._pending.pop(number) for number in needs if number in self._pending]
        if not found:
            return
        if len(self._events) > FETCHES_IN_FLIGHT:
            self.draft.host_wait(self._events.popleft(), "host_wait/fetch")
        for each in found:
            if each.flat is not None:
                self._copy_out(each.numbers, each.flat)
                each.flat = None
        self._events.append(self._latest)

    def _copy_out(self, numbers: Sequence[int], flat: str) -> None:
        draft = self.draft
        for number in numbers:
            whole = self.whole(number)
            draft.allocate(whole)
            self._latest = draft.add(
                Copy(
                    id=draft.path(f"copy_out/{self.shards.bucket(number).name}"),
                    stream=self.stream,
                    source=draft.all(flat),
                    target=draft.all(whole),
                    by_parameter=True,
                )
            )
        draft.free(flat)

    def release(self, numbers: Sequence[int], used: str) -> None:
        """Free whole parameters, which `used` read last; keep a secondary shard, with hpZ."""
        for number in numbers:
            last = used if self.strategy.inner is None else self._keep(number)
            self.draft.free(self.whole(number), (last,), mode=self._mode)

    def _keep(self, number: int) -> str:
        """Copy the secondary shard, for which the host waits; written again each time."""
        draft, bucket, inner = self.draft, self.shards.bucket(number), self.strategy.inner
        assert inner is not None
        name = _secondary(bucket)
        if name not in draft.buffers:
            pieces, elements = bucket.layout.pieces, bucket.padded
            self.layouts.append(Layout(name=name, pieces=pieces, elements=elements, axis=INNER))
        size = bucket.padded // inner
        draft.buffer(
            name,
            size,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            layout=name,
            shard=INNER,
        )
        if name not in draft.alive:
            draft.allocate(name)
            self._secondary[number] = ()
        kept = draft.add(
            Copy(
                id=draft.path(f"keep/{bucket.name}"),
                stream=COMPUTE,
                source=View(buffer=self.whole(number), size=size, axis=INNER),
                target=draft.all(name),
            )
        )
        draft.host_wait(kept, f"host_wait/{bucket.name}")
        return kept

    def setup_persistent(self) -> None:
        """Gather the persistent parameters for the first step; empty ones are there for good."""
        for number in self.shards.persistent:
            self.draft.persistent.append(self.whole(number))
            if self.shards.bucket(number).elements:
                group = self.shards.groups.all[self.shards.where[number][0]]
                self._gather_persistent(number, f"setup/{group.name}/initialize/parameter")
            else:
                self.draft.allocate(self.whole(number))
        self._latest = ""

    def free_persistent(self, used: str) -> None:
        """Before the update persistent parameters are freed too."""
        for number in self._not_empty():
            self.draft.free(self.whole(number), (used,), mode=self._mode)

    def end_step(self, updated: str) -> None:
        """After the update gather persistent parameters, each alone; drop secondary shards."""
        latest = self._latest
        for number in self._not_empty():
            self._gather_persistent(number, updated)
        if self._latest != latest:
            self.draft.host_wait(self._latest)
        for number, uses in self._secondary.items():
            self.draft.free(_secondary(self.shards.bucket(number)), uses)

    def _not_empty(self) -> list[int]:
        return [n for n in self.shards.persistent if self.shards.bucket(n).elements]

    def _gather_persistent(self, number: int, after: str) -> None:
        self._gather_one(number, DATA, (after,))
        del self._pending[number]


def _secondary(bucket: Bucket) -> str:
    return f"{bucket.name}/secondary"
