"""Persistent buffers between steps: their content after setup, and comparison after a step."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from zsim.proof.execution.class_memory import ClassMemory
from zsim.proof.execution.contents import Contents
from zsim.proof.execution.datum import Datum, Marks
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.moves import Moves
from zsim.proof.execution.pieces import Integers
from zsim.proof.execution.tensors import NOTHING, Tensors
from zsim.schedule.access import accesses, distinct, touching, viewed
from zsim.schedule.operation import Action, Branch, Compute, Copy, Operation, Role, View, walk
from zsim.schedule.schedule import Program
from zsim.specification.residues import Numbers, Random
from zsim.specification.step import TensorCuts, TrainingState

PARAMETER, MOMENT, UPDATED, ANY, CONSTANT = 0, 1, 8, 9, 10
"""Content of a place in a persistent buffer: a parameter with which the next step computes, moment
number 0 or 1 (1 or 2), a parameter that a delayed update has changed already, arbitrary numbers,
constant number 0, 1, ... (from CONSTANT on). Setup does not write places with NOTHING."""

OTHER = "another value than after plain training"

Kinds = dict[tuple[int, str], Integers]
"""A number for each place, by class and buffer; NOTHING for most."""

States = tuple[TrainingState, TrainingState]
"""The state with which a step computes, and the state with all earlier gradients applied."""

LaidOut = dict[str, Integers]
"""The content of each place by persistent buffer, shape (ranks..., places)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """A difference between the state after a step and plain training: place and parameter."""

    role: str
    buffer: str
    parameter: str
    rank: int
    why: str


class Persistent:
    """The persistent buffers of all classes.

    `initial` holds the parameters at the start of setup, `moments` the number of moments of each
    parameter, 0 for frozen ones. With `delayed` updates there are two states: one with which the
    next step computes, and one with all gradients so far applied.
    """

    def __init__(
        self,
        tensors: Tensors,
        moves: Moves,
        contents: Contents,
        *,
        random: Random,
        initial: TrainingState,
        moments: Mapping[str, int],
        delayed: bool,
    ) -> None:
        self.tensors = tensors
        self.grid = tensors.grid
        self.moves = moves
        self.contents = contents
        self.cut: TensorCuts = contents.cut
        self.random = random
        self.initial = initial
        self.moments = moments
        self._trains = UPDATED if delayed else PARAMETER
        self._orders, self._trained = self._updated()
        self._copied = {
            (ranks.index, each.target.buffer)
            for ranks in self.grid.classes
            for each in ranks.program.step_patterns
            if isinstance(each, Copy) and (ranks.index, each.source.buffer) in self._trained
        }

    def _updated(self) -> tuple[Kinds, Kinds]:
        """Return the moment of each place, and the places that updates train, by class and buffer.

        For a state that is copied from elsewhere for the update, such as from a file, the source
        is marked.
        """
        moments: Kinds = {}
        trained: Kinds = {}
        for ranks in self.grid.classes:
            program = ranks.program
            updates = [each for each in program.patterns if _is_update(each)]
            # Most copies are of gradients, which are no state.
            states = {
                each.view.buffer
                for update in updates
                for each in update.operands
                if each.role is not Role.GRADIENT
            }
            staged: dict[View, View] = {}
            for operation in chain(program.setup_work, program.step_work) if updates else ():
                if isinstance(operation, Copy) and operation.target.buffer in states:
                    staged[operation.target] = operation.source
                if not _is_update(operation):
                    continue
                views = [each.view for each in operation.operands if each.role is Role.MOMENT]
                for order, view in enumerate(views):
                    self._mark(moments, ranks, staged.get(view, view), order)
                for each in operation.operands:
                    if each.role in (Role.MASTER, Role.PARAMETER):
                        kept = staged.get(each.view, each.view)
                        self._mark(trained, ranks, kept, PARAMETER)
        return moments, trained

    def _mark(self, kinds: Kinds, ranks: RankArray, view: View, kind: int) -> None:
        """Mark the places of a view with a kind."""
        key = (ranks.index, view.buffer)
        if key not in kinds:
            shape = (*ranks.shape, self.tensors.held(ranks, view.buffer).width)
            kinds[key] = np.full(shape, NOTHING, np.int64)
        index = self.tensors.index(ranks, view)
        if index.take is None:
            kinds[key][..., index.low : index.high] = kind
            return
        take = np.broadcast_to(index.take, (*ranks.shape, index.take.shape[-1]))
        for rank in np.ndindex(*ranks.shape):
            own = take[rank]
            kinds[key][rank][own[own >= 0]] = kind

    def drifting(self, layout: list[LaidOut]) -> Iterator[StateDifference]:
        """Yield trained places and moments with other contents than in training on some rank."""
        for ranks, places in zip(self.grid.classes, layout, strict=True):
            for name, kinds in places.items():
                for wanted, first in ((self._trained, self._trains), (self._orders, MOMENT)):
                    due = wanted.get((ranks.index, name))
                    if due is None:
                        continue
                    is_piece = self.moves.pieces(ranks, name) != NOTHING
                    bad = (due != NOTHING) & (kinds != due + first) & is_piece
                    if bad.any():
                        yield self._difference(ranks, name, bad, f"{OTHER}, on this rank")

    def begin(self, first: list[ClassMemory]) -> list[LaidOut]:
        """Return the layout of contents after setup, by class."""
        found: list[LaidOut] = []
        for ranks, memory in zip(self.grid.classes, first, strict=True):
            layout: LaidOut = {}
            for name in ranks.program.persistent:
                datum = memory.buffers.get(name)
                if datum is not None:
                    layout[name] = self._laid_out(ranks, name, datum)
            for name, over in self._written_first(ranks, layout).items():
                layout[name] = np.where(over & (layout[name] >= CONSTANT), ANY, layout[name])
            found.append(layout)
        return found

    def _written_first(self, ranks: RankArray, layout: LaidOut) -> dict[str, Marks]:
        """Return the places of constants that a step overwrites before it reads them.

        Their content at the start of a step makes no difference, and a step does not preserve the
        constant; to find that out otherwise would take a run of the step. Accesses that differ
        between ranks count as reads.
        """
        unread: dict[str, Marks] = {
            name: np.logical_or.reduce((kinds >= CONSTANT).reshape(-1, kinds.shape[-1]))
            for name, kinds in layout.items()
            if (kinds >= CONSTANT).any()
        }
        found = {name: np.zeros(places.shape, bool) for name, places in unread.items()}
        for outside in _outside_branches(ranks.program) if unread else ():
            inside = touching(walk((outside,))) if type(outside) is Branch else (outside,)
            for operation in inside:
                if unread.keys().isdisjoint([view.buffer for view in viewed(operation)]):
                    continue
                for view, reads, writes in accesses(operation):
                    if view.buffer not in unread:
                        continue
                    index, left = self.tensors.index(ranks, view), unread[view.buffer]
                    place = slice(index.low, index.high) if index.take is None else slice(None)
                    if writes and not (reads or isinstance(outside, Branch)) and index.take is None:
                        found[view.buffer][place] |= left[place]
                    left[place] = False
        return found

    def _laid_out(self, ranks: RankArray, name: str, datum: Datum) -> Integers:
        """Return the content of a buffer after setup: trained places, parameters, constants."""
        pieces = self.moves.pieces(ranks, name)
        wanted = self.contents.content(ranks, name, self.initial.parameters)
        shape = np.broadcast_shapes(pieces.shape, datum.values.shape[1:], wanted.shape[1:])
        found = np.full(shape, ANY, np.int64)
        order = self._orders.get((ranks.index, name))
        is_piece = _shaped(pieces != NOTHING, shape)
        if order is not None:
            shape = np.broadcast_shapes(order.shape, shape)
            zero = _shaped((datum.values == 0).all(axis=0), shape)
            found = np.where(is_piece & zero & (order != NOTHING), MOMENT + order, ANY)
        else:
            same = _shaped((datum.values == wanted).all(axis=0), shape)
            if not (is_piece & same).any():
                for number_of, value in enumerate(self.moves.constants):
                    constant = value.reshape(2, *(1,) * len(shape))
                    equal = _shaped((datum.values == constant).all(axis=0), shape)
                    found[equal] = CONSTANT + number_of
            found[is_piece & same] = self._trains if self._is_updated(ranks, name) else PARAMETER
        if datum.undefined is not None:
            found[np.broadcast_to(datum.undefined, found.shape)] = NOTHING
        return found

    def _is_updated(self, ranks: RankArray, name: str) -> bool:
        """Return True if a buffer is trained, or is copied from a trained one."""
        if (ranks.index, name) in self._trained:
            return True
        return (ranks.index, name) in self._copied

    def memory(
        self, layout: list[LaidOut], state: States, scalars: Mapping[str, float]
    ) -> list[ClassMemory]:
        """Return memory with this layout, in a state of training and with these host scalars."""
        found: list[ClassMemory] = []
        for ranks, places in zip(self.grid.classes, layout, strict=True):
            memory = ClassMemory(
                scalars={each.name: scalars[each.name] for each in self.tensors.schedule.scalars}
            )
            for name, kinds in places.items():
                undefined = kinds == NOTHING
                memory.buffers[name] = Datum(
                    self._filled(ranks, name, kinds, state), undefined if undefined.any() else None
                )
            found.append(memory)
        return found

    def _filled(self, ranks: RankArray, name: str, kinds: Integers, state: States) -> Numbers:
        """Return the content of a buffer with this layout in a state; random numbers for ANY."""
        present = set(kinds.ravel().tolist())
        read, updated = state
        states = {PARAMETER: read.parameters, UPDATED: updated.parameters}
        states |= {MOMENT + place: each for place, each in enumerate(updated.moments)}
        values: Numbers | None = None
        for kind in present:
            if kind in states:
                content = self.contents.content(ranks, name, states[kind])
            elif kind >= CONSTANT:
                constant = self.moves.constants[kind - CONSTANT]
                content = constant.reshape(2, *(1,) * kinds.ndim)
            else:
                content = self.random.draw(kinds.shape)
            values = content if values is None else np.where(kinds == kind, content, values)
        if values is None:
            return np.zeros((2, *kinds.shape), np.uint64)
        if values.shape[-1] == kinds.shape[-1]:
            return values
        return np.broadcast_to(values, (2, *values.shape[1:-1], kinds.shape[-1]))

    def compare(
        self,
        memory: list[ClassMemory],
        layout: list[LaidOut],
        kept: list[LaidOut],
        wanted: States,
        *,
        overflows: bool,
    ) -> list[StateDifference]:
        """Return differences from the wanted state; mark their places in `kept` ANY or NOTHING."""
        found: list[StateDifference] = []
        for ranks, own, places, left in zip(self.grid.classes, memory, layout, kept, strict=True):
            for name, kinds in places.items():
                datum = own.buffers.get(name)
                values = self._filled(ranks, name, kinds, wanted)
                if (
                    not overflows
                    and datum is not None
                    and datum.undefined is None
                    and not (datum.values != values).any()
                ):
                    continue
                undefined: Marks = np.zeros((1,) * kinds.ndim, bool)
                if datum is None:
                    undefined = ~undefined
                elif datum.undefined is not None:
                    undefined = datum.undefined
                bad = undefined & (kinds != NOTHING)
                laid_out = (kinds != NOTHING) & (kinds != ANY)
                if datum is not None and laid_out.any():
                    other = (datum.values != values).any(axis=0)
                    if overflows and datum.words is not None:
                        other = other | (datum.words != 0).any(axis=0)
                    bad = bad | (other & laid_out)
                held = self.tensors.held(ranks, name)  # ranks may have fewer pieces than places
                bad = bad & (np.arange(held.width) < held.counts[..., np.newaxis])
                if bad.any():
                    given_up = np.where(undefined, NOTHING, ANY)
                    left[name] = np.where(bad, given_up, left[name])
                    why = OTHER if (bad & ~undefined).any() else "what nothing wrote"
                    why += " after a step that overflowed" if overflows else ""
                    found.append(self._difference(ranks, name, bad, why))
        return found

    def _difference(self, ranks: RankArray, name: str, bad: Marks, why: str) -> StateDifference:
        """Return a difference with the first rank and the first parameter among `bad` places."""
        *rank, place = (int(each[0]) for each in np.nonzero(bad))
        pieces = self.moves.pieces(ranks, name)
        own = pieces[tuple(min(a, b - 1) for a, b in zip(rank, pieces.shape, strict=False))]
        at = tuple(min(a, b - 1) for a, b in zip(rank, ranks.shape, strict=True))
        number_of = self.tensors.mesh.rank(ranks.coordinates(at))
        parameter = self.moves.names[own[place]] if own[place] != NOTHING else ""
        return StateDifference(
            role=ranks.program.role,
            buffer=name,
            parameter=parameter,
            rank=number_of,
            why=why,
        )

    def missing(self, layout: list[LaidOut]) -> Iterator[StateDifference]:
        """Yield parameters, or moments of them, that the ranks together do not keep completely."""
        most = max(self.moments.values(), default=0)
        tensor = () if self.cut.tensor is None else (self.cut.tensor,)
        experts = self.cut.experts
        for of_experts in (False, True) if experts else (False,):
            held = self._held(layout, self.cut.expert if of_experts else tensor, most)
            for kind, part, piece in zip(*np.nonzero(~held[..., :-1]), strict=True):
                name = self.moves.names[int(piece)]
                if experts and (name in experts) is not of_experts:
                    continue
                if (part and not self.cut.held(name)) or kind > self.moments.get(name, most):
                    continue
                what = "parameter" if kind == PARAMETER else f"moment {kind}"
                why = f"no buffer that outlives the step keeps its {what}"
                yield StateDifference(role="", buffer="", parameter=name, rank=int(part), why=why)

    def _held(self, layout: list[LaidOut], places: tuple[int, ...], most: int) -> NDArray[np.bool_]:
        """Return True for pieces that ranks keep, by kind, part along `places`, and piece."""
        parts = prod(self.cut.shape[place - 1] for place in places)
        held = np.zeros((1 + most, parts, len(self.moves.names) + 1), bool)
        for ranks, own in zip(self.grid.classes, layout, strict=True):
            part_of = self._part_of(ranks, places)[..., np.newaxis]
            for name, kinds in own.items():
                for kind in set(kinds.ravel().tolist()):
                    if PARAMETER <= kind < MOMENT + most:
                        here = kinds == kind
                        shape = np.broadcast_shapes(here.shape, part_of.shape)
                        pieces = np.where(here, self.moves.pieces(ranks, name), NOTHING)
                        flat = np.broadcast_to(pieces, shape).ravel()
                        held[kind, np.broadcast_to(part_of, shape).ravel(), flat] = True
        return held

    def _part_of(self, ranks: RankArray, places: tuple[int, ...]) -> Integers:
        """Return for each rank of a class its part along dimensions `places`, lanes counted."""
        found = np.zeros(ranks.shape, np.int64)
        for place in places:
            shape = [1] * len(ranks.shape)
            shape[place - 1] = -1
            whole = self.grid.tracked[self.grid.axes[place - 1]].coordinates
            own = [whole.index(each) for each in ranks.along[place - 1].coordinates]
            found = found * len(whole) + np.array(own, np.int64).reshape(shape)
        return found


def _shaped(marks: Marks, shape: tuple[int, ...]) -> Marks:
    """Return marks in a shape, which they mostly have: broadcasting costs more than comparing."""
    return marks if marks.shape == shape else np.broadcast_to(marks, shape)


def _is_update(operation: Operation) -> TypeGuard[Compute]:
    return isinstance(operation, Compute) and operation.action is Action.UPDATE


def _outside_branches(program: Program) -> Iterable[Operation]:
    """Return the operations of a step that touch buffers, without repetitions; a branch is one."""
    return distinct(program.step) if program.branches else program.step_patterns
