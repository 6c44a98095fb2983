"""ZeRO-R Pa+cpu: checkpoints move to host memory after forward, and back before they are needed.

Rajbhandari et al. 2020, sections 6.1 and 8. A copy out runs beside the forward of the next unit,
whose end waits for it: one unit's checkpoint is on its way while the device holds it. A copy back
is issued one unit ahead, and runs beside that unit's backward. With Pa each rank moves its own
slice; without it every rank of the tensor axis moves all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zsim.model.model import Model
from zsim.schedule.operation import Copy, Edge, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.checkpoints import Checkpoints, Shelf, brought_back
from zsim.zero.partitioned_checkpoints import gather, own_elements
from zsim.zero.visit_order import UnitVisit
from zsim.zero.writer import COMPUTE, FROM_HOST, TO_HOST, Draft


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Device memory that a copy out still reads."""

    buffer: str
    copied: str


class Offloaded(Checkpoints):
    """Checkpoints whose shelf is in host memory."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        shelf: Shelf,
        *,
        visits: Sequence[UnitVisit],
    ) -> None:
        super().__init__(draft, model, strategy, shelf)
        backward = [visit for visit in visits if visit.backward]
        self._next = {visit.unit: following.parts for visit, following in pairwise(backward)}
        self._out: dict[str, str] = {}
        self._leaving: list[_Leaving] = []
        self._back: dict[str, str] = {}

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Copy what the unit was given out, after `last`; that of the unit before has arrived."""
        for value in visit.parts:
            source, made = value, last
            if self.strategy.cuts_checkpoints:
                source = self._slice("part", value, COMPUTE)
                self.draft.allocate(source)
                made = self._shelve(value, self.draft.all(source))
            self._out[value] = self._copy_out(value, self.draft.all(source), made)
            self._leaving.append(_Leaving(source, self._out[value]))
        while len(self._leaving) > len(visit.parts):
            self._forget()

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Copy it back if that has not begun, and begin with that of the unit before it."""
        while self._leaving:
            self._forget()
        for value in (*visit.parts, *self._next.get(visit.unit, ())):
            if value not in self._back:
                self._back[value] = self._copy_back(value)
        arrived = tuple(self._back.pop(value) for value in visit.parts)
        if not self.strategy.cuts_checkpoints:
            return arrived
        for value, copied in zip(visit.parts, arrived, strict=True):
            part = self._slice("returned", value, FROM_HOST)
            source = self.draft.all(part)
            gathered = gather(self.draft, self.model, value, source=source, after=(copied,))
            self.draft.free(part, (gathered,))
        return ()

    def view(self, value: str) -> View:
        """What was copied back, whole."""
        return self.draft.all(brought_back(value))

    def end(self, value: str, last: str) -> None:
        """Its memory is free again: at once where it was gathered, after `last` otherwise."""
        self.draft.free(brought_back(value), () if self.strategy.cuts_checkpoints else (last,))

    def _copy_out(self, value: str, source: View, made: str) -> str:
        target = self.shelf.make_room(value)
        return self.draft.add(
            Copy(
                id=self.draft.path(f"offload/{value}"),
                stream=TO_HOST,
                after=(made,),
                source=source,
                target=target,
            )
        )

    def _copy_back(self, value: str) -> str:
        if self.strategy.cuts_checkpoints:
            target = self._slice("returned", value, FROM_HOST)
        else:
            whole = self.model.values[value]
            target = self.draft.buffer(
                brought_back(value), whole.elements, whole.dtype, Kind.WORKSPACE, home=FROM_HOST
            )
        self.draft.allocate(target)
        copied = self.draft.add(
            Copy(
                id=self.draft.path(f"fetch/{value}"),
                stream=FROM_HOST,
                after=(self._out.pop(value),),
                source=self.shelf.view(value),
                target=self.draft.all(target),
            )
        )
        self.shelf.clear(value, (copied,))
        return copied

    def _slice(self, name: str, value: str, home: str) -> str:
        """A buffer of the rank's share on the device: on its way out, or back."""
        return self.draft.buffer(
            f"{value}/{name}",
            own_elements(self.model, self.strategy, value),
            self.model.values[value].dtype,
            Kind.SAVED,
            home=home,
        )

    def _forget(self) -> None:
        """The device's memory of the oldest checkpoint on its way is given back."""
        oldest = self._leaving.pop(0)
        self.draft.free(oldest.buffer, (oldest.copied,))
