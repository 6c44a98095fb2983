"""Proves values: any step of a schedule, run on exact numbers, is the step of plain training.

The state of training is arbitrary, and laid out in persistent buffers as setup lays it out. A step
is run from there, on each way of its branches; where what it leaves is not laid out in the same way
again, that layout is given up (what is there is then nobody's, and must not be read), and the step is
run again, until nothing more is given up (Flanagan and Leino 2001, Houdini). Holds what is left all
parameters and moments, then every step of any length of training is proved.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from zsim.access import accesses
from zsim.check.execution.classes import tracked
from zsim.check.execution.datum import Datum, Marks
from zsim.check.execution.grid import Cell, Grid, every
from zsim.check.execution.kernels import Departure, Kernels
from zsim.check.execution.links import TENSOR, Links
from zsim.check.execution.machine import Machine, Memory
from zsim.check.execution.meeting import Meetings
from zsim.check.execution.moves import Moves
from zsim.check.execution.reading import Training
from zsim.check.execution.tensors import NOTHING, Tensors
from zsim.dtype import DType
from zsim.model import BATCH, Model, Segment, Unit, Value
from zsim.operation import Action, Compute, Role, walk
from zsim.rule import SGD, Adam
from zsim.schedule import Schedule
from zsim.specification.field import BITS, Numbers, Random
from zsim.specification.step import Cut, PlainStep, State

SEED = 20_261_122
ROUNDS_MAX = 8
"""Times that a layout is given up in part before the proof is."""

RANKS_MAX = 4096
"""Ranks that are run at most, each for itself or for a class."""


class TooManyRanksError(Exception):
    """More ranks would have to be run than a proof runs; the message says how many."""


Integers = NDArray[np.int64]

PARAMETER, MOMENT, ANY, CONSTANT = 0, 1, 9, 10
"""What a place of a persistent buffer holds: a parameter, moment number 0 or 1 (1 or 2), numbers of
which nothing is said, constant number 0, 1, ... NOTHING is what setup does not write."""

Layout = dict[str, Integers]
"""By persistent buffer what each place of it holds, in the shape of the ranks and places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a step leaves that plain training does not: where, of which parameter, and what."""

    role: str
    buffer: str
    parameter: str
    rank: int
    why: str
    writer: str = ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of the runs: nothing of all this if values are proved.

    `departures` are the first segments that read something else than in plain training.
    """

    differences: list[Difference] = field(default_factory=list[Difference])
    departures: list[Departure] = field(default_factory=list[Departure])
    troubles: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    error_bits: int = 0


_LOSS = Value(name="loss", elements=1, dtype=DType.FP32)
UNKNOWN = Model(
    name="unknown",
    units=(Unit(name="", parameters=(), segments=(Segment(inputs=(BATCH,), outputs=(_LOSS,)),)),),
    batch=Value(name=BATCH, elements=1, dtype=DType.INT64, requires_gradient=False),
)
"""Stands for a model of which nothing is known: no segment is its."""


class Proof:
    """One schedule, cut and ready to run."""

    def __init__(
        self,
        schedule: Schedule,
        model: Model | None,
        training: Training | None,
        *,
        unfolded: bool = False,
    ) -> None:
        self.schedule = schedule
        judges = model is not None and training is not None
        self.model = model = model or UNKNOWN
        self.training = training = training or Training(
            micro_batches=1, divisor=1, optimizer=SGD(), clip=None
        )
        along, parts = (every(schedule), {}) if unfolded else tracked(schedule)
        ranks = prod(len(each.coordinates) for each in along.values())
        if ranks > RANKS_MAX:
            raise TooManyRanksError(f"{ranks} ranks that no class stands for")
        self.grid = Grid(schedule, along)
        self.tensors = Tensors(schedule, self.grid, parts)
        Links(self.tensors, model).add()
        self.tensors.close(self.grid.cells)
        self.random = Random(SEED)
        self.moves = Moves(self.tensors)
        self.cut = self._cut()
        self.moments = 2 if isinstance(training.optimizer, Adam) else 0
        self.plain = self._plain()
        self.initial = self.plain.state(0, 0.0)
        self.kernels = Kernels(
            self.tensors, self.moves, self.random, self.plain, self.initial.parameters
        )
        self.kernels.judges = judges
        self.machine = Machine(
            self.tensors, Meetings(self.grid, self.tensors), self.kernels, self.moves
        )
        self._orders = self._moment_orders()

    def _plain(self) -> PlainStep:
        return PlainStep(
            self.model, self.cut, self.random, micro_batches=self.training.micro_batches
        )

    def _cut(self) -> Cut:
        spaces = self.tensors.spaces.by_key
        axes = self.grid.axes
        data = tuple(
            1 + place for place, name in enumerate(axes) if name in self.schedule.contract.data_axes
        )
        copied = {each.name for each in self.model.parameters if not each.tensor_sharded}
        tensor = 1 + axes.index(TENSOR) if TENSOR in axes else None
        if tensor is not None and len(self.grid.tracked[TENSOR].coordinates) == 1:
            tensor = None
        tracked = [self.grid.tracked[name] for name in axes]
        return Cut(
            shape=tuple(len(each.coordinates) for each in tracked),
            weights=tuple(each.weights for each in tracked),
            data=data,
            tensor=tensor,
            parameters={
                key[1]: (space.sizes * space.weights).tolist()
                for key, space in spaces.items()
                if key[0] == "parameter"
            },
            values={key[1]: space.count for key, space in spaces.items() if key[0] == "value"},
            whole={key[1]: space.count for key, space in spaces.items() if key[0] == "whole"},
            copied=frozenset(copied),
        )

    def _moment_orders(self) -> dict[tuple[int, str], Integers]:
        """Return which moment each place of a buffer is, as updates use them; NOTHING of others."""
        found: dict[tuple[int, str], Integers] = {}
        for cell in self.grid.cells:
            for operation in cell.program.by_id.values():
                if not isinstance(operation, Compute) or operation.action is not Action.UPDATE:
                    continue
                views = [each.view for each in operation.operands if each.role is Role.MOMENT]
                for order, view in enumerate(views):
                    held = self.tensors.held(cell, view.buffer)
                    key = (cell.index, view.buffer)
                    if key not in found:
                        shape = (*cell.shape, held.width)
                        found[key] = np.full(shape, NOTHING, np.int64)
                    index = self.tensors.index(cell, view)
                    if index.take is None:
                        found[key][..., index.low : index.high] = order
                        continue
                    take = np.broadcast_to(index.take, (*cell.shape, index.take.shape[-1]))
                    for rank in np.ndindex(*cell.shape):
                        own = take[rank]
                        found[key][rank][own[own >= 0]] = order
        return found

    def run(self, scalars: Mapping[str, float]) -> Outcome:
        """Run steps from the state that `scalars` of the host are of; what came of them.

        Raises:
            UnfollowedError: the schedule does what cannot be followed.
        """
        outcome = Outcome(error_bits=self._error_bits())
        layout = self._begin(self._setup())
        for _ in range(ROUNDS_MAX):
            kept, differences = self._round(layout, scalars)
            outcome.troubles.update(self.machine.troubles)
            if not differences:
                break
            if not outcome.differences:
                outcome.differences = differences
            layout = kept
        missing = list(self._missing(layout))
        if not missing:
            outcome.differences = []
        elif outcome.differences:
            self._explain(outcome, scalars)
        else:
            outcome.differences = missing
        return outcome

    def _round(
        self, layout: list[Layout], scalars: Mapping[str, float]
    ) -> tuple[list[Layout], list[Difference]]:
        """Run a step on each of its ways: what is left of a layout, and what differs."""
        self.plain = self._plain()
        state = self.plain.state(self.moments, scalars["updates"])
        gradients = self.plain.gradients(state.parameters, self.training.divisor)
        used = self.plain.clipped(gradients, self.training.clip)
        new = self.plain.updated(state, used, self.training.optimizer)
        self.kernels.begin(self.plain, used)
        kept = [dict(each) for each in layout]
        differences: list[Difference] = []
        for overflows in (False, True) if self.kernels.follows_overflow else (False,):
            memory = self._memory(layout, state, scalars)
            self.machine.run(memory, setup=False, overflows=overflows)
            differences += self._compare(memory, layout, kept, state if overflows else new)
        return kept, differences

    def _explain(self, outcome: Outcome, scalars: Mapping[str, float]) -> None:
        """Run the first round again: where does it leave plain training?"""
        self.kernels.explains = True
        self._round(self._begin(self._setup()), scalars)
        outcome.departures = list(self.kernels.departures)
        self.kernels.explains = False

    def unheld(self) -> list[Difference]:
        """Return parameters of which no rank keeps all that setup has made."""
        return list(self._missing(self._begin(self._setup())))

    def wander(self) -> dict[tuple[str, str], str]:
        """Run steps on all pairs of ways from what setup leaves; what is wrong whatever they train.

        Raises:
            UnfollowedError: the schedule does what cannot be followed.
        """
        memory = self._setup()
        self.kernels.begin(self.plain, {})
        for overflows in (False, False, True, True, False):
            self.machine.run(memory, setup=False, overflows=overflows)
        return self.machine.troubles

    def _error_bits(self) -> int:
        """Return b where a difference is overlooked with a probability below 2**-b.

        Kernels are random functions of a digest of what they read, and factors are never zero. So a
        difference is lost only where a sum of differences, each times a number of its own, happens
        to be zero: below 2**-BITS for each digest, square of a norm, and number compared.
        """
        count = 1
        for cell in self.grid.cells:
            ranks = int(np.prod(cell.shape))
            count += 2 * ranks * len(cell.program.by_id)
        count += sum(space.count for space in self.tensors.spaces.by_key.values())
        return BITS - count.bit_length()

    def _setup(self) -> list[Memory]:
        """Run setup; what it leaves."""
        initial = {each.name: each.initial for each in self.schedule.scalars}
        memory = [Memory(scalars=dict(initial)) for _ in self.grid.cells]
        self.machine.run(memory, setup=True, overflows=False)
        return memory

    def _begin(self, first: list[Memory]) -> list[Layout]:
        """Return where setup has laid out what."""
        found: list[Layout] = []
        for cell, memory in zip(self.grid.cells, first, strict=True):
            layout: Layout = {}
            for name in cell.program.persistent:
                datum = memory.buffers.get(name)
                if datum is not None:
                    layout[name] = self._laid_out(cell, name, datum)
            found.append(layout)
        return found

    def _laid_out(self, cell: Cell, name: str, datum: Datum) -> Integers:
        """Return what a buffer holds after setup: what updates train, a parameter, a constant."""
        pieces = self.moves.pieces(cell, name)
        wanted = self.kernels.content(cell, name, self.initial.parameters)
        shape = np.broadcast_shapes(pieces.shape, datum.values.shape[1:], wanted.shape[1:])
        found = np.full(shape, ANY, np.int64)
        order = self._orders.get((cell.index, name))
        is_piece = np.broadcast_to(pieces != NOTHING, shape)
        if order is not None:
            shape = np.broadcast_shapes(order.shape, shape)
            zero = np.broadcast_to((datum.values == 0).all(axis=0), shape)
            found = np.where(is_piece & zero & (order != NOTHING), MOMENT + order, ANY)
        else:
            same = np.broadcast_to((datum.values == wanted).all(axis=0), shape)
            if not (is_piece & same).any():
                for number_of, value in enumerate(self.moves.constants):
                    constant = value.reshape(2, *(1,) * len(shape))
                    found[np.broadcast_to((datum.values == constant).all(axis=0), shape)] = (
                        CONSTANT + number_of
                    )
            found[is_piece & same] = PARAMETER
        if datum.undefined is not None:
            found[np.broadcast_to(datum.undefined, found.shape)] = NOTHING
        return found

    def _memory(
        self, layout: list[Layout], state: State, scalars: Mapping[str, float]
    ) -> list[Memory]:
        found: list[Memory] = []
        for cell, places in zip(self.grid.cells, layout, strict=True):
            memory = Memory(
                scalars={each.name: scalars[each.name] for each in self.schedule.scalars}
            )
            for name, kinds in places.items():
                undefined = kinds == NOTHING
                memory.buffers[name] = Datum(
                    self._filled(cell, name, kinds, state), undefined if undefined.any() else None
                )
            found.append(memory)
        return found

    def _filled(self, cell: Cell, name: str, kinds: Integers, state: State) -> Numbers:
        """Return what a buffer holds that is laid out so in a state; any numbers where it is ANY."""
        present = set(np.unique(kinds).tolist())
        states = {PARAMETER: state.parameters}
        states |= {MOMENT + place: each for place, each in enumerate(state.moments)}
        values: Numbers | None = None
        for kind in present:
            if kind in states:
                content = self.kernels.content(cell, name, states[kind])
            elif kind >= CONSTANT:
                constant = self.moves.constants[kind - CONSTANT]
                content = constant.reshape(2, *(1,) * kinds.ndim)
            else:
                content = self.random.draw(kinds.shape)
            if values is None:
                values = content
            else:
                values = np.where(kinds == kind, content, values)
        if values is None:
            return np.zeros((2, *kinds.shape), np.uint64)
        return np.broadcast_to(values, (2, *values.shape[1:-1], kinds.shape[-1]))

    def _compare(
        self,
        memory: list[Memory],
        layout: list[Layout],
        kept: list[Layout],
        wanted: State,
    ) -> list[Difference]:
        """Return what differs from the wanted state, and give it up in `kept`."""
        found: list[Difference] = []
        for cell, own, places, left in zip(self.grid.cells, memory, layout, kept, strict=True):
            for name, kinds in places.items():
                datum = own.buffers.get(name)
                undefined: Marks = np.zeros((1,) * kinds.ndim, bool)
                if datum is None:
                    undefined = ~undefined
                elif datum.undefined is not None:
                    undefined = datum.undefined
                bad = undefined & (kinds != NOTHING)
                laid_out = (kinds != NOTHING) & (kinds != ANY)
                if datum is not None and laid_out.any():
                    values = self._filled(cell, name, kinds, wanted)
                    other = (datum.values != values).any(axis=0)
                    if self.machine.overflows and datum.trail is not None:
                        other = other | (datum.trail.words != 0).any(axis=0)
                    bad = bad | (other & laid_out)
                if bad.any():
                    given_up = np.where(undefined, NOTHING, ANY)
                    left[name] = np.where(bad, given_up, left[name])
                    found.append(self._difference(cell, name, datum, bad))
        return found

    def _difference(self, cell: Cell, name: str, datum: Datum | None, bad: Marks) -> Difference:
        *rank, place = (int(each[0]) for each in np.nonzero(bad))
        pieces = self.moves.pieces(cell, name)
        own = pieces[tuple(min(a, b - 1) for a, b in zip(rank, pieces.shape, strict=False))]
        at = tuple(min(a, b - 1) for a, b in zip(rank, cell.shape, strict=True))
        number_of = self.tensors.mesh.rank(cell.coordinates(at))
        why = "another value than after plain training"
        if datum is None:
            why = "no memory"
        elif datum.undefined is not None:
            marks = np.broadcast_to(
                datum.undefined, np.broadcast_shapes(datum.undefined.shape, bad.shape)
            )
            if marks[(*rank, place)]:
                why = "what nothing wrote"
        if self.machine.overflows:
            why += " after a step that overflowed"
        parameter = self.moves.names[own[place]] if own[place] != NOTHING else ""
        return Difference(
            role=cell.program.role,
            buffer=name,
            parameter=parameter,
            rank=number_of,
            why=why,
            writer=_writer(cell, name),
        )

    def _missing(self, layout: list[Layout]) -> Iterator[Difference]:
        """Yield parameters, or moments of them, of which no rank keeps all."""
        count = len(self.moves.names)
        held = np.zeros((1 + self.moments, self._parts(), count + 1), bool)
        for cell, places in zip(self.grid.cells, layout, strict=True):
            parts = self._part_of(cell)[..., np.newaxis]
            for name, kinds in places.items():
                for kind in range(PARAMETER, MOMENT + self.moments):
                    here = kinds == kind
                    if here.any():
                        shape = np.broadcast_shapes(here.shape, parts.shape)
                        pieces = np.where(here, self.moves.pieces(cell, name), NOTHING)
                        flat = np.broadcast_to(pieces, shape).ravel()
                        held[kind, np.broadcast_to(parts, shape).ravel(), flat] = True
        for kind, part, piece in zip(*np.nonzero(~held[..., :-1]), strict=True):
            name = self.moves.names[int(piece)]
            if part and name in self.cut.copied:
                continue
            what = "parameter" if kind == PARAMETER else f"moment {kind}"
            why = f"no buffer that outlives the step keeps its {what}"
            yield Difference(role="", buffer="", parameter=name, rank=int(part), why=why)

    def _parts(self) -> int:
        return 1 if self.cut.tensor is None else self.cut.shape[self.cut.tensor - 1]

    def _part_of(self, cell: Cell) -> Integers:
        """Return for each rank of a cell which part of tensors it has."""
        found = np.zeros(cell.shape, np.int64)
        if self.cut.tensor is None:
            return found
        place = self.cut.tensor - 1
        shape = [1] * len(cell.shape)
        shape[place] = -1
        whole = self.grid.tracked[TENSOR].coordinates
        own = [whole.index(each) for each in cell.along[place].coordinates]
        return found + np.array(own, np.int64).reshape(shape)


def _writer(cell: Cell, name: str) -> str:
    """Return the last operation of a step that writes a buffer."""
    found = ""
    for operation in walk(cell.program.step):
        if any(access.writes and access.view.buffer == name for access in accesses(operation)):
            found = operation.id
    return found
