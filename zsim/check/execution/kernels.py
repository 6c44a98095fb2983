"""What computations make of what they read, beside what the plain step reads and makes.

A segment that reads what the plain step reads makes what the plain step makes. One that reads
anything else makes numbers that are drawn for what it reads. The first of those are remembered: they
say where a schedule that comes to something else has left the plain step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from zsim.check.execution.datum import (
    Datum,
    Marks,
    Trail,
    Words,
    anywhere,
    chosen,
    like,
    read,
    trail_of,
    undefined_in,
)
from zsim.check.execution.grid import Cell
from zsim.check.execution.moves import Moves
from zsim.check.execution.tensors import NOTHING, Tensors
from zsim.operation import Action, Compute, Role, View
from zsim.rule import SGD, Adam, ClipNorm
from zsim.specification import kernel
from zsim.specification.field import Numbers, Random, number, product, summed, total
from zsim.specification.step import Application, PlainStep

Integers = NDArray[np.int64]
Makes = list[Datum | None]


@dataclass(frozen=True, slots=True)
class Departure:
    """A segment that reads something else than in the plain step: which operand, of what kind."""

    role: str
    operation: str
    operand: str
    buffer: str
    undefined: bool


class Kernels:
    """Runs computations of all cells; `initial` has the parameters that setup begins with."""

    def __init__(
        self,
        tensors: Tensors,
        moves: Moves,
        random: Random,
        plain: PlainStep,
        initial: Mapping[str, Numbers],
    ) -> None:
        self.tensors = tensors
        self.moves = moves
        self.random = random
        self.plain = plain
        self.initial = initial
        self.departures: list[Departure] = []
        self.judges = True
        self.explains = False
        self.means: Mapping[str, Numbers] = {}
        self.segments = {unit.name: unit.segments for unit in plain.model.units}
        self.follows_overflow = any(
            isinstance(operation, Compute) and operation.action is Action.FINITE
            for program in tensors.schedule.programs
            for operation in program.by_id.values()
        )
        grid = tensors.grid
        sizes = [len(grid.tracked[name].coordinates) for name in grid.axes]
        self._bits = int(np.prod(sizes, dtype=np.int64)) * plain.micro_batches
        self._words = -(-self._bits // 64)
        self._ranks = np.arange(int(np.prod(sizes, dtype=np.int64))).reshape(sizes)
        self._own: dict[tuple[int, int], Words] = {}
        self._weights: dict[tuple[int, View], Numbers] = {}
        self.required = np.zeros((self._words, len(moves.names)), np.uint64)
        self._contents: dict[tuple[int, str, str, int], tuple[Mapping[str, Numbers], Numbers]] = {}
        self._takes: dict[tuple[int, str, str, int], tuple[list[str], Integers]] = {}

    def begin(self, plain: PlainStep, means: Mapping[str, Numbers]) -> None:
        """Forget the last run, and compare with `plain`, whose gradients are `means`, from now on."""
        self.plain = plain
        self.means = means
        self.departures.clear()
        self.required[:] = 0

    def run(
        self,
        cell: Cell,
        compute: Compute,
        operands: Sequence[Datum],
        scalars: Mapping[str, float],
        *,
        in_setup: bool,
    ) -> Makes:
        """Return what is written to each operand; None to those that are only read."""

        def of(role: Role) -> list[Datum]:
            pairs = zip(compute.operands, operands, strict=True)
            return [datum for operand, datum in pairs if operand.role is role]

        scale = scalars[compute.scalars[0]] if compute.scalars else None
        match compute.action:
            case Action.FORWARD | Action.RECOMPUTE:
                return self._forward(cell, compute, operands, of)
            case Action.BACKWARD:
                return self._backward(cell, compute, operands, of)
            case Action.UPDATE:
                return self._update(cell, compute, operands, of, scale)
            case Action.NORM:
                return self._norm(cell, compute, operands)
            case Action.FINITE:
                return self._finite(cell, compute, operands)
            case Action.UNSCALE:
                share = number(1 / Fraction(scale or 1.0), len(cell.shape) + 2)
                return [
                    like((each,), product(each.values, share))
                    if operand.role is Role.GRADIENT
                    else None
                    for operand, each in zip(compute.operands, operands, strict=True)
                ]
            case Action.CLIP:
                return self._clip(compute, operands, of, scale or 1.0)
            case Action.INITIALIZE:
                return [self._initialize(cell, operand.view) for operand in compute.operands]
            case Action.LOAD:
                return self._load(cell, compute, operands, in_setup=in_setup)
            case _:
                assert_never(compute.action)

    def _within(self, cell: Cell, numbers: Numbers) -> Numbers:
        """Return what the ranks of a cell have of numbers of all ranks."""
        axes = self.tensors.grid.axes
        place: list[slice] = [slice(None)]
        for axis, along, size in zip(axes, cell.along, numbers.shape[1:-1], strict=True):
            whole = self.tensors.grid.tracked[axis].coordinates
            if size == 1 or len(whole) == len(along.coordinates):
                place.append(slice(None))
            else:
                start = whole.index(along.coordinates[0])
                place.append(slice(start, start + len(along.coordinates)))
        return numbers[tuple(place)]

    def _applications(self, compute: Compute) -> list[Application]:
        """Return the runs of a segment in the plain step, that of its micro-batch first."""
        known = self.plain.applications
        order = [compute.micro_batch, *range(self.plain.micro_batches)]
        keys = ((compute.unit, compute.segment, batch) for batch in dict.fromkeys(order))
        return [known[key] for key in keys if key in known]

    def _differs(self, cell: Cell, datum: Datum, wanted: Numbers) -> Marks | None:
        """Return on which ranks a datum is not the numbers, (ranks..., 1); None if on none."""
        wanted = self._within(cell, wanted)
        if datum.count != wanted.shape[-1]:
            return np.ones((1,) * (wanted.ndim - 1), bool)
        differs = datum.values != wanted
        if datum.undefined is None and not differs.any():
            return None
        marks: Marks = differs.any(axis=0).any(axis=-1, keepdims=True)
        if datum.undefined is not None:
            marks = marks | datum.undefined.any(axis=-1, keepdims=True)
        return marks if marks.any() else None

    def _apart(
        self,
        cell: Cell,
        compute: Compute,
        read: Sequence[tuple[str, Datum, Numbers]],
        *,
        notes: bool,
    ) -> Marks | None:
        """Return on which ranks an operand is another than in the plain step; None if on none."""
        found: Marks | None = None
        for name, datum, wanted in read:
            differs = self._differs(cell, datum, wanted)
            if differs is None:
                continue
            if notes and found is None:
                self._note(cell, compute, name, datum)
            found = differs if found is None else found | differs
        return found

    def _note(self, cell: Cell, compute: Compute, name: str, datum: Datum) -> None:
        role, place = name.rsplit(" ", 1)
        views = [each.view for each in compute.operands if each.role == role]
        buffer = views[int(place)].buffer if int(place) < len(views) else ""
        undefined = datum.undefined is not None and bool(datum.undefined.any())
        self.departures.append(Departure(cell.program.role, compute.id, role, buffer, undefined))

    def _forward(
        self,
        cell: Cell,
        compute: Compute,
        operands: Sequence[Datum],
        of: Callable[[Role], list[Datum]],
    ) -> Makes:
        inputs, parameters = of(Role.INPUT), of(Role.PARAMETER)
        runs = self._applications(compute)
        outputs = [each.count for each in of(Role.OUTPUT)]
        saves = [each.count for each in of(Role.SAVED)]

        def reads(run: Application) -> list[tuple[str, Datum, Numbers]] | None:
            if (len(inputs), len(parameters)) != (len(run.inputs), len(run.parameters)):
                return None
            return [
                *_paired(Role.INPUT, inputs, run.inputs),
                *_paired(Role.PARAMETER, parameters, run.parameters),
            ]

        def makes(run: Application) -> list[Numbers] | None:
            counts = [each.shape[-1] for each in run.outputs]
            if counts != outputs or (saves and run.saved is None):
                return None
            made = [self._within(cell, each) for each in run.outputs]
            if saves and run.saved is not None:
                saved = self._within(cell, run.saved)
                made += [np.broadcast_to(saved, (*saved.shape[:-1], count)) for count in saves]
            return made

        made = self._chosen(
            cell,
            compute,
            (*inputs, *parameters),
            runs,
            reads=reads,
            makes=makes,
            counts=[*outputs, *saves],
            alike=len(saves),
        )
        by_role = {
            Role.OUTPUT: iter(made[: len(outputs)]),
            Role.SAVED: iter(made[len(outputs) :]),
        }
        return [
            self._given(operand.role, by_role, datum)
            for operand, datum in zip(compute.operands, operands, strict=True)
        ]

    def _given(
        self, role: Role, made: Mapping[Role, Callable[[], Datum] | object], datum: Datum
    ) -> Datum | None:
        if role is Role.WORKSPACE:
            shape = (*(1,) * (datum.values.ndim - 2), datum.count)
            return Datum(np.zeros((2, *shape), np.uint64), np.ones(shape, bool))
        values = made.get(role)
        return next(values) if values is not None else None  # type: ignore[call-overload, no-any-return]

    def _chosen(
        self,
        cell: Cell,
        compute: Compute,
        read: Sequence[Datum],
        runs: Sequence[Application],
        *,
        reads: Callable[[Application], list[tuple[str, Datum, Numbers]] | None],
        makes: Callable[[Application], list[Numbers] | None],
        counts: Sequence[int],
        alike: int,
    ) -> list[Datum]:
        """Return what a segment makes: as in the plain step where it reads what is read there.

        The last `alike` of what it makes are one number each.
        """
        found: list[Numbers] | None = None
        apart: Marks | None = None
        for number_of, run in enumerate(runs):
            pairs, made = reads(run), makes(run)
            if pairs is None or made is None:
                continue
            differs = self._apart(cell, compute, pairs, notes=number_of == 0)
            if differs is None:
                return [Datum(each) for each in made]
            if found is None:
                found, apart = self._drawn(compute, read, counts, alike), None
            known = ~differs
            found = [np.where(known, of_run, old) for of_run, old in zip(made, found, strict=True)]
            apart = differs if apart is None else apart & differs
        if found is None:
            found = self._drawn(compute, read, counts, alike)
        undefined = anywhere(*read)
        return [
            Datum(
                each,
                None
                if undefined is None
                else np.broadcast_to(undefined, (*undefined.shape[:-1], each.shape[-1])),
            )
            for each in found
        ]

    def _drawn(
        self, compute: Compute, read: Sequence[Datum], counts: Sequence[int], alike: int
    ) -> list[Numbers]:
        """Return numbers drawn for exactly what is read."""
        name = f"{compute.unit}/{compute.segment} {compute.action == Action.BACKWARD}"
        dimensions = len(self.tensors.grid.axes) + 2
        seen = np.zeros((2, *(1,) * (dimensions - 1)), np.uint64)
        for place, datum in enumerate(read):
            seen = total(seen, kernel.digest(self.random, f"{name} reads {place}", datum.values))
        made: list[Numbers] = []
        for place, count in enumerate(counts):
            single = place >= len(counts) - alike
            drawn = kernel.function(
                self.random, f"{name} makes {place}", seen, 1 if single else count
            )
            made.append(np.broadcast_to(drawn, (*drawn.shape[:-1], count)) if single else drawn)
        return made

    def _backward(
        self,
        cell: Cell,
        compute: Compute,
        operands: Sequence[Datum],
        of: Callable[[Role], list[Datum]],
    ) -> Makes:
        inputs, saved, parameters = of(Role.INPUT), of(Role.SAVED), of(Role.PARAMETER)
        slopes, gradients = of(Role.OUTPUT_GRADIENT), of(Role.GRADIENT)
        towards = of(Role.INPUT_GRADIENT)
        counts = [each.count for each in (*gradients, *towards)]

        def reads(run: Application) -> list[tuple[str, Datum, Numbers]] | None:
            kept = [] if run.saved is None else [run.saved]
            if (len(inputs), len(parameters)) != (len(run.kept), len(run.parameters)):
                return None
            if bool(saved) != bool(kept):
                return None
            return [
                *_paired(Role.INPUT, inputs, run.kept),
                *[
                    (
                        f"{Role.SAVED} {place}",
                        each,
                        np.broadcast_to(kept[0], (*kept[0].shape[:-1], each.count)),
                    )
                    for place, each in enumerate(saved)
                ],
                *_paired(Role.PARAMETER, parameters, run.parameters),
            ]

        def makes(run: Application) -> list[Numbers] | None:
            if [high - low for low, high in zip([0, *run.ends], run.ends, strict=False)] != counts:
                return None
            return [self._within(cell, run.towards)]

        read = (*inputs, *saved, *parameters)
        whole = self._chosen(
            cell,
            compute,
            read,
            self._applications(compute),
            reads=reads,
            makes=makes,
            counts=[sum(counts)],
            alike=0,
        )[0]
        slope = self.plain.slope(
            f"{compute.unit}/{compute.segment}", [each.values for each in slopes]
        )
        undefined = anywhere(*slopes)
        if whole.undefined is not None:
            bad = whole.undefined.any(axis=-1, keepdims=True)
            undefined = bad if undefined is None else undefined | bad
        made = product(whole.values, slope)
        parts: list[Datum] = []
        start = 0
        for count in counts:
            values = made[..., start : start + count]
            marks = None
            if undefined is not None:
                marks = np.broadcast_to(undefined, (*undefined.shape[:-1], count))
            parts.append(Datum(values, marks))
            start += count
        if self.follows_overflow:
            self._mark(cell, compute, parts[: len(gradients)])
        by_role = {
            Role.GRADIENT: iter(parts[: len(gradients)]),
            Role.INPUT_GRADIENT: iter(parts[len(gradients) :]),
        }
        return [
            self._given(operand.role, by_role, datum)
            for operand, datum in zip(compute.operands, operands, strict=True)
        ]

    def _mark(self, cell: Cell, compute: Compute, gradients: Sequence[Datum]) -> None:
        """Say of new gradients whose they are."""
        segments = self.segments.get(compute.unit, ())
        if compute.segment >= len(segments) or compute.micro_batch >= self.plain.micro_batches:
            return
        words = self._bit(cell, compute.micro_batch)
        every = np.bitwise_or.reduce(words.reshape(self._words, -1), axis=1)
        for parameter, datum in zip(segments[compute.segment].parameters, gradients, strict=False):
            first = self.moves.first(parameter)
            pieces = np.arange(first, first + datum.count)
            shape = (*(1,) * len(cell.shape), datum.count)
            datum.trail = Trail(
                np.broadcast_to(words, (*words.shape[:-1], datum.count)), pieces.reshape(shape)
            )
            self.required[:, first : first + datum.count] |= every[:, np.newaxis]

    def _bit(self, cell: Cell, micro_batch: int) -> Words:
        """Return the bit of each rank of a cell and a micro-batch, shape (words, ranks..., 1)."""
        key = (cell.index, micro_batch)
        if key not in self._own:
            ranks = self._within(cell, self._ranks[np.newaxis, ..., np.newaxis])[0]  # type: ignore[arg-type]
            bits = ranks * self.plain.micro_batches + micro_batch
            words = np.zeros((self._words, *bits.shape), np.uint64)
            one = np.uint64(1) << (bits % 64).astype(np.uint64)
            np.put_along_axis(words, (bits // 64)[np.newaxis], one[np.newaxis], axis=0)
            self._own[key] = words
        return self._own[key]

    def _compare_gradient(self, cell: Cell, compute: Compute, gradient: Datum) -> None:
        """Note it if an update reads another gradient than that of plain training."""
        for operand in compute.operands:
            if operand.role not in (Role.MASTER, Role.PARAMETER) or not self.means:
                continue
            buffer = operand.view.buffer
            index = self.tensors.index(cell, operand.view)
            pieces = read(Datum(self.moves.pieces(cell, buffer)[np.newaxis] + 1), index).values - 1  # type: ignore[arg-type]
            wanted = read(Datum(self.content(cell, buffer, self.means)), index).values
            apart = (gradient.values != wanted).any(axis=0) & (pieces[0] != NOTHING)
            if apart.any():
                self._note(cell, compute, f"{Role.GRADIENT} 0", gradient)
            return

    def _update(
        self,
        cell: Cell,
        compute: Compute,
        operands: Sequence[Datum],
        of: Callable[[Role], list[Datum]],
        step: float | None,
    ) -> Makes:
        rule = compute.rule
        assert isinstance(rule, Adam | SGD)
        gradients = of(Role.GRADIENT)
        trained = of(Role.MASTER) + of(Role.PARAMETER)
        touched = [*gradients, *trained, *of(Role.MOMENT)]
        if (len(gradients), len(trained)) != (1, 1):
            return [
                None
                if operand.role is Role.GRADIENT
                else Datum(datum.values, np.ones(datum.values.shape[1:], bool))
                for operand, datum in zip(compute.operands, operands, strict=True)
            ]
        values = kernel.updated(
            self.random,
            rule,
            [each.values for each in touched],
            step if isinstance(rule, Adam) else None,
        )
        if self.explains and not self.departures:
            self._compare_gradient(cell, compute, gradients[0])
        undefined, trail = undefined_in(*touched), trail_of(*touched)
        made = [Datum(each, undefined, trail) for each in values]
        moments = iter(made[1:])
        found: Makes = []
        for operand in compute.operands:
            if operand.role is Role.GRADIENT:
                found.append(None)
            else:
                found.append(next(moments) if operand.role is Role.MOMENT else made[0])
        return found

    def weights(self, cell: Cell, view: View) -> Numbers:
        """Return how many elements each place of a view counts for in a norm, (2, ranks..., places).

        Of a part that stands for those of several ranks, they are the mean of these.
        """
        key = (cell.index, view)
        found = self._weights.get(key)
        if found is None:
            held = self.tensors.held(cell, view.buffer)
            sizes = np.append(held.space.sizes * held.space.weights, 0)
            at = held.first[..., np.newaxis] + np.arange(held.width)
            inside = np.arange(held.width) < held.counts[..., np.newaxis]
            whole = np.where(inside, sizes[np.where(inside, at, -1)], 0)
            whole = whole * self._counted(cell, view.buffer)
            index = self.tensors.index(cell, view)
            if index.take is None:
                found = whole[..., index.low : index.high].astype(np.uint64)
            else:
                found = chosen(whole, index.take).astype(np.uint64)
            found = np.stack([found, found])
            share = self._stands_for(cell, view)
            if share is not None:
                found = product(found, share)
            self._weights[key] = found
        return found

    def _stands_for(self, cell: Cell, view: View) -> Numbers | None:
        """Return the share of a rank in the parts it stands for, (2, ranks..., 1)."""
        axes = self.tensors.varies(cell.program, view)
        found = None
        for place, along in enumerate(cell.along):
            if along.name in axes and any(weight != 1 for weight in along.weights):
                shape = [1] * (len(cell.shape) + 2)
                shape[1 + place] = -1
                shares = np.concatenate([number(Fraction(1, each), 2) for each in along.weights], 1)
                share = shares.reshape(2, *shape[1:])
                found = share if found is None else product(found, share)
        return found

    def _counted(self, cell: Cell, name: str) -> Integers:
        """Return 1 for each place that a rank counts: of copies, those of the first rank alone."""
        pieces = self.moves.pieces(cell, name)
        buffer = cell.program.by_name[name]
        copied: dict[str, tuple[str, ...]] = {}
        if buffer.layout is not None:
            layout = self.tensors.schedule.layout_by_name[buffer.layout]
            copied = {each.parameter: each.copies for each in layout.pieces if each.copies}
        if not copied:
            return np.ones((1,) * (len(cell.shape) + 1), np.int64)
        found = np.ones((*cell.shape, pieces.shape[-1]), np.int64)
        names = self.moves.names
        for rank in np.ndindex(*cell.shape):
            at = self.tensors.grid.at(cell, rank)
            own = pieces[tuple(min(a, b - 1) for a, b in zip(rank, pieces.shape, strict=False))]
            for place, piece in enumerate(own.tolist()):
                axes = copied.get(names[piece], ()) if piece != NOTHING else ()
                if any(at[axis] for axis in axes):
                    found[rank][place] = 0
        return found

    def _norm(self, cell: Cell, compute: Compute, operands: Sequence[Datum]) -> Makes:
        dimensions = len(cell.shape) + 2
        squares = np.zeros((2, *(1,) * (dimensions - 1)), np.uint64)
        undefined: Marks | None = None
        for operand, datum in zip(compute.operands, operands, strict=True):
            if operand.role is not Role.GRADIENT or not datum.count:
                continue
            weights = self.weights(cell, operand.view)
            square = product(product(datum.values, datum.values), weights)
            squares = total(squares, summed(square, -1, keepdims=True))
            undefined = _more(undefined, datum, weights)
        return [
            Datum(squares, undefined) if operand.role is Role.OUTPUT else None
            for operand in compute.operands
        ]

    def _finite(self, cell: Cell, compute: Compute, operands: Sequence[Datum]) -> Makes:
        count = len(self.moves.names)
        covered = np.zeros((self._words, *(1,) * len(cell.shape), count + 1), np.uint64)
        undefined: Marks | None = None
        for operand, datum in zip(compute.operands, operands, strict=True):
            if operand.role is not Role.GRADIENT or not datum.count:
                continue
            undefined = _more(undefined, datum, self.weights(cell, operand.view))
            if datum.trail is not None:
                covered = _cover(covered, datum.trail)
        zero = np.zeros((2, *(1,) * (len(cell.shape) + 1)), np.uint64)
        verdict = Datum(zero, undefined, covered=covered[..., :-1] if undefined is None else None)
        return [verdict if operand.role is Role.OUTPUT else None for operand in compute.operands]

    def uncovered(self, covered: Words) -> str:
        """Return the first gradient that a verdict does not cover on some rank, in words."""
        shape = (self._words, *(1,) * (covered.ndim - 2), -1)
        left = self.required.reshape(shape) & ~covered
        if not left.any():
            return ""
        missing = np.bitwise_or.reduce(left.reshape(self._words, -1, left.shape[-1]), axis=1)
        word, piece = (int(each[0]) for each in np.nonzero(missing))
        bits = int(missing[word, piece])
        bit = word * 64 + (bits & -bits).bit_length() - 1
        rank, micro_batch = divmod(bit, self.plain.micro_batches)
        name = self.moves.names[piece]
        return f"the gradient of {name} on rank {rank}, micro-batch {micro_batch},"

    def _clip(
        self,
        compute: Compute,
        operands: Sequence[Datum],
        of: Callable[[Role], list[Datum]],
        scale: float,
    ) -> Makes:
        assert isinstance(compute.rule, ClipNorm)
        squares = of(Role.INPUT)[0]
        factor = kernel.clipping(self.random, compute.rule, squares.values, scale)
        found: Makes = []
        for operand, datum in zip(compute.operands, operands, strict=True):
            if operand.role is not Role.GRADIENT:
                found.append(None)
                continue
            made = like((datum,), product(datum.values, factor))
            if squares.undefined is not None and squares.undefined.any():
                made.undefined = _either(made.undefined, squares.undefined, datum.count)
            found.append(made)
        return found

    def _initialize(self, cell: Cell, view: View) -> Datum:
        index = self.tensors.index(cell, view)
        if cell.program.by_name[view.buffer].layout is None:
            return Datum(self.random.draw((*cell.shape, index.count)))
        return read(Datum(self.content(cell, view.buffer, self.initial)), index)

    def content(self, cell: Cell, name: str, state: Mapping[str, Numbers]) -> Numbers:
        """Return what a buffer holds that has a state of all its parameters; zero in the padding."""
        buffer = cell.program.by_name[name]
        if buffer.layout is None:
            width = self.tensors.held(cell, name).width
            return np.zeros((2, *(1,) * len(cell.shape), width), np.uint64)
        held = self.tensors.held(cell, name)
        key = (cell.index, buffer.layout, buffer.shard or "", held.width)
        known = self._contents.get(key)
        if known is not None and known[0] is state:
            return known[1]
        names, take = self._take(key, self.moves.pieces(cell, name), buffer.layout)
        parts = [self._within(cell, state[each]) for each in names]
        lead = np.broadcast_shapes(
            *(part.shape[:-1] for part in parts), (2, *(1,) * len(cell.shape))
        )
        flat = np.zeros((*lead, sum(part.shape[-1] for part in parts)), np.uint64)
        width = 0
        for part in parts:
            flat[..., width : width + part.shape[-1]] = part
            width += part.shape[-1]
        found: Numbers = chosen(flat, take)  # type: ignore[assignment]
        self._contents[key] = state, found
        return found

    def _take(
        self, key: tuple[int, str, str, int], pieces: Integers, layout: str
    ) -> tuple[list[str], Integers]:
        """Return the parameters of a layout, and where each place is in them one after the other."""
        if key not in self._takes:
            where = np.full(len(self.moves.names) + 1, NOTHING, np.int64)
            named = self.tensors.schedule.layout_by_name[layout].pieces
            names = list(dict.fromkeys(piece.parameter for piece in named if piece.size))
            width = 0
            for each in names:
                first = self.moves.first(each)
                count = len(self.plain.cut.parameters[each])
                where[first : first + count] = np.arange(width, width + count)
                width += count
            self._takes[key] = names, np.where(pieces == NOTHING, NOTHING, where[pieces])
        return self._takes[key]

    def _load(
        self, cell: Cell, compute: Compute, operands: Sequence[Datum], *, in_setup: bool
    ) -> Makes:
        found: Makes = []
        for operand, datum in zip(compute.operands, operands, strict=True):
            if operand.role is not Role.OUTPUT:
                found.append(None)
                continue
            if not self.judges:
                found.append(Datum(self.random.draw((*cell.shape, datum.count))))
                continue
            known = compute.micro_batch < self.plain.micro_batches and not in_setup
            batch = self.plain.batches[compute.micro_batch if known else 0]
            if known and batch.shape[-1] == datum.count:
                found.append(Datum(self._within(cell, batch)))
            else:
                found.append(Datum(datum.values, np.ones(datum.values.shape[1:], bool)))
        return found


def _paired(
    role: Role, data: Sequence[Datum], wanted: Sequence[Numbers]
) -> list[tuple[str, Datum, Numbers]]:
    return [
        (f"{role} {place}", datum, numbers)
        for place, (datum, numbers) in enumerate(zip(data, wanted, strict=True))
    ]


def _more(undefined: Marks | None, datum: Datum, weights: Numbers) -> Marks | None:
    """Return on which ranks something that counts is undefined."""
    if datum.undefined is None:
        return undefined
    bad = (datum.undefined & weights.any(axis=0)).any(axis=-1, keepdims=True)
    if not bad.any():
        return undefined
    return bad if undefined is None else undefined | bad


def _either(marks: Marks | None, single: Marks, count: int) -> Marks:
    wide = np.broadcast_to(single, (*single.shape[:-1], count))
    return wide if marks is None else marks | wide


def _cover(covered: Words, trail: Trail) -> Words:
    """Return the set with all gradients of which numbers are made; the last place is for others."""
    pieces = np.where(trail.pieces < 0, covered.shape[-1] - 1, trail.pieces)[np.newaxis]
    lead = np.broadcast_shapes(covered.shape[:-1], trail.words.shape[:-1], pieces.shape[:-1])
    found = np.broadcast_to(covered, (*lead, covered.shape[-1])).copy()
    where = np.broadcast_to(pieces, (*lead, pieces.shape[-1]))
    old = np.take_along_axis(found, where, axis=-1)
    np.put_along_axis(found, where, old | trail.words, axis=-1)
    return found
