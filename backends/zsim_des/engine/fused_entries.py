"""Stream entries for fused operations: chunks of a `Compute`, copies, and their sum."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from zsim.cluster.cluster import Gpu
from zsim.model.kernel import FusedPart
from zsim.schedule.fusions import MAKES, Fusions
from zsim.schedule.operation import AllReduce, Compute, Edge, Operation, ReduceScatter
from zsim_des.engine.fused import FusedChunk, chunks, sum_ps
from zsim_des.engine.instruction import After, Enqueue


class FusedEntries:
    """Cuts fused operations of a program into entries; adds the slots of the parts to `slots`.

    `streams` maps names to numbers, `ranks` has the size of each group, and `after` converts the
    edges of an operation to dependencies.
    """

    def __init__(
        self,
        fusions: Fusions,
        gpu: Gpu,
        *,
        slots: dict[str, int],
        streams: Mapping[str, int],
        ranks: Mapping[str, int],
        after: Callable[[str, tuple[Edge, ...]], After],
    ) -> None:
        self._fusions = fusions
        self._gpu = gpu
        self._slots = slots
        self._streams = streams
        self._ranks = ranks
        self._after = after
        self._chunked: dict[tuple[int, tuple[str, ...], bool], list[FusedChunk]] = {}
        self._made: dict[str, int] = {}
        self._held: dict[str, Enqueue] = {}
        self._competing = frozenset(
            name
            for each in self._fusions.computes.values()
            for part, name in each.gathers.items()
            if part in each.competing
        )

    def of(self, operation: Operation, last: Enqueue) -> list[Enqueue]:
        """Return the entries of `operation`; `last` is the final one.

        A gather issued with a kernel of its reader is returned with the entries of that reader.
        """
        if operation.id in self._fusions.readers:
            last.begins = self._slot(operation.id, "begun")
            last.share = None if operation.id in self._competing else 0
            self._held[operation.id] = last
            return [] if self._comes_late(operation.id) else [self._held.pop(operation.id)]
        if isinstance(operation, Compute) and operation.id in self._fusions.computes:
            return self._chunks(operation, last)
        makers = self._fusions.makers
        if isinstance(operation, ReduceScatter | AllReduce) and operation.id in makers:
            return [self._copies(operation, last), last]
        return [last]

    def _comes_late(self, gather: str) -> bool:
        """Return True if a gather is issued with the product it overlaps, not before all chunks."""
        gathers = self._fusions.computes[self._fusions.readers[gather].id].gathers
        return gathers.get(FusedPart.BESIDE_GATHER) == gather

    def _slot(self, name: str, part: object) -> int:
        return self._slots.setdefault(f"{name}/{part}", len(self._slots))

    def _chunks(self, compute: Compute, last: Enqueue) -> list[Enqueue]:
        gathers = self._fusions.computes[compute.id].gathers
        fused = set(gathers.values())
        rest = tuple(edge for edge in compute.after if edge not in fused)
        entries, own = list[Enqueue](), list[Enqueue]()
        cut = self._chunks_of(compute)
        for number, chunk in enumerate(cut, 1):
            for held in filter(None, (self._held.pop(gathers[part], None) for part in chunk.begun)):
                here = tuple(before.slot for before in own[-1:])
                held.after = After((*held.after.here, *here), held.after.earlier)
                entries.append(held)
            each = last
            if number < len(cut):
                each = replace(last, slot=self._slot(compute.id, number), is_part=True)
            known = self._after(compute.id, rest if number == 1 else ())
            begun = (self._slot(gathers[part], "begun") for part in chunk.begun)
            ended = (self._slots[gathers[part]] for part in chunk.ended)
            each.after = After((*known.here, *begun, *ended), known.earlier)
            each.time_ps, each.moving_ps = chunk.time_ps, chunk.moving_ps
            each.launch_ps *= number == 1  # the host issues all of it at once
            if chunk.is_made:
                self._made[compute.id] = each.slot
            entries.append(each)
            own.append(each)
        last.parts = tuple(each.slot for each in own[:-1])
        return entries

    def _chunks_of(self, compute: Compute) -> list[FusedChunk]:
        """Return the chunks of a `Compute`. Computes with the same kernels share them.

        Gather names differ between such computes; the caller looks them up by part.
        """
        fusion = self._fusions.computes[compute.id]
        key = (id(compute.kernels), tuple(fusion.gathers), fusion.scatter is not None)
        if key not in self._chunked:
            ranks = self._ranks[fusion.group]
            self._chunked[key] = chunks(compute.kernels, fusion, self._gpu, ranks=ranks)
        return self._chunked[key]

    def _copies(self, scatter: ReduceScatter | AllReduce, last: Enqueue) -> Enqueue:
        """Return the copies of a scattered output; `last` then sums them on its maker's stream."""
        maker = self._fusions.makers[scatter.id]
        known = self._after(scatter.id, tuple(e for e in scatter.after if e != maker.id))
        slot = self._slot(scatter.id, "copies")
        copies = replace(last, slot=slot, is_part=True)
        competes = MAKES & self._fusions.computes[maker.id].competing
        copies.share = None if competes else 0
        copies.after = After((*known.here, self._made[maker.id]), known.earlier)
        last.stream, last.members, last.parts = self._streams[maker.stream], (), (slot,)
        last.after, last.launch_ps = After((slot,), ()), 0
        last.time_ps = last.moving_ps = sum_ps(maker.kernels, self._gpu)
        return copies
