"""Exact values on numpy: a model, its optimizer and collectives, modulo a prime."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import assert_never

import numpy as np

from zsim.backend.values import Seat
from zsim.dtype import DType
from zsim.schedule.access import accesses
from zsim.schedule.issue_order import NO_OVERFLOW
from zsim.schedule.layout import Fragment
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Action, Communication, Compute, Copy, Fill, Role, View
from zsim.schedule.schedule import Buffer, Schedule
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer, rate_of
from zsim_des.values import passes, stand_in
from zsim_des.values.carrier import STATE
from zsim_des.values.drawn import Masks, Segments
from zsim_des.values.exchange import received, reduced_by
from zsim_des.values.field import (
    NOT_FINITE,
    PRIME,
    Numbers,
    dot,
    inverse,
    number,
    product,
    reduced,
)
from zsim_des.values.planted import Planted
from zsim_des.values.truth import data, initial, is_counted, part_of, replica_of


class Modular:
    """Implements `Values`. `planted` gradients are not finite.

    In steps of `overflow_steps` without planted gradients, those of the first micro-batch of the
    first replica are not finite.
    """

    def __init__(
        self,
        schedule: Schedule,
        overflow_steps: frozenset[int] = NO_OVERFLOW,
        planted: Sequence[Planted] = (),
        *,
        apart: Segments = frozenset(),
    ) -> None:
        self.schedule = schedule
        self._masks = Masks(schedule, apart)
        self._planted = tuple(planted)
        self._overflow_steps = overflow_steps - {each.step for each in planted}
        self._elements = {each.name: each.elements for each in schedule.contract.parameters}
        self._untrained = {each.name for each in schedule.contract.parameters if each.frozen}
        self._counted: dict[tuple[View, int], Numbers] = {}
        self._fragments: dict[tuple[str, int], tuple[Fragment, ...]] = {}

    def memory(self, elements: int, dtype: DType) -> Numbers:
        """Return new memory, spoiled; one number per element for every format."""
        del dtype
        return np.full(elements, np.nan)

    def window(self, memory: Numbers, start: int, size: int) -> Numbers:
        """Return `size` elements of `memory` from `start` on."""
        return memory[start : start + size]

    def invalidate(self, window: Numbers) -> None:
        """Make every element of `window` invalid (NaN)."""
        window.fill(np.nan)

    def is_invalidated(self, window: Numbers) -> bool:
        """Return True if every element of `window` is NaN."""
        return bool(np.count_nonzero(np.isnan(window)) == len(window))

    def taken(self, window: Numbers) -> Numbers:
        """Return a copy of `window`."""
        return window.copy()

    def same(self, one: Numbers, other: Numbers) -> bool:
        """Return True if both hold the same bits."""
        return one.tobytes() == other.tobytes()

    def store(self, window: Numbers, value: Numbers) -> None:
        """Store `value` in `window`."""
        window[:] = value

    def is_zero(self, window: Numbers) -> bool:
        """Return True if the only element is zero."""
        return bool(window[0] == 0)

    def fragments(self, buffer: Buffer, seat: Seat) -> tuple[Fragment, ...]:
        """Return the parts of parameters in `buffer` on a rank, with their positions."""
        key = (buffer.name, seat.rank)
        found = self._fragments.get(key)
        if found is None:
            found = self._fragments[key] = self._find_fragments(buffer, seat.coordinates)
        return found

    def _find_fragments(self, buffer: Buffer, coordinates: Coordinates) -> tuple[Fragment, ...]:
        if buffer.layout is None:
            return ()
        layout = self.schedule.layout_by_name[buffer.layout]
        count = 1 if layout.axis is None else self.schedule.mesh.axis_size(layout.axis)
        own = None if buffer.shard is None else coordinates[buffer.shard]
        return tuple(layout.fragments(count, own))

    def apply(
        self,
        operation: Compute | Fill | Copy,
        views: Sequence[Numbers],
        *,
        seat: Seat,
        step: int,
        scalars: Mapping[str, float],
    ) -> Sequence[Numbers | None]:
        """Return the outputs of `operation`; see `Values.apply`."""
        match operation:
            case Fill(value=value, scalar=scalar):
                scale = 1 if scalar is None else number(scalars[scalar])
                return [np.full(len(views[0]), float(number(value) * scale % PRIME))]
            case Copy():
                return [None, self._copied(operation, views, seat)]
            case Compute():
                made = self._computed(operation, views, seat=seat, step=step, scalars=scalars)
                written = iter(made)
                return [next(written) if each.writes else None for each in accesses(operation)]
            case _:
                assert_never(operation)

    def _copied(self, copy: Copy, views: Sequence[Numbers], seat: Seat) -> Numbers:
        source, target = views
        if copy.divisor >= PRIME:
            raise ValueError(f"{copy.id}: divisor {copy.divisor} must be below the prime {PRIME}")
        share = inverse(copy.divisor)
        if not copy.by_parameter:
            moved = product(source, share)
            return reduced(target + moved) if copy.accumulate else moved
        by_name = seat.program.by_name
        here = self.fragments(by_name[copy.source.buffer], seat)
        there = self.fragments(by_name[copy.target.buffer], seat)
        found = np.zeros(len(target))
        for each in there:
            window = slice(each.position, each.position + each.size)
            found[window] = target[window]
        for first, at, size in shared(here, there):
            moved = product(source[first : first + size], share)
            if copy.accumulate:
                moved = reduced(moved + target[at : at + size])
            found[at : at + size] = moved
        return found

    def _computed(
        self,
        compute: Compute,
        views: Sequence[Numbers],
        *,
        seat: Seat,
        step: int,
        scalars: Mapping[str, float],
    ) -> Sequence[Numbers]:
        """Return the outputs of `compute`, in the order of its operands."""

        def of(role: Role) -> list[Numbers]:
            pairs = zip(compute.operands, views, strict=True)
            return [view for operand, view in pairs if operand.role is role]

        scale = scalars[compute.scalars[0]] if compute.scalars else 1.0
        match compute.action:
            case Action.FORWARD | Action.RECOMPUTE:
                state = scalars.get(STATE, 0.0)
                drawn = self._masks.draw(compute, seat.coordinates, step, state)
                return passes.forward(compute, of, drawn)
            case Action.BACKWARD | Action.BACKWARD_INPUT | Action.BACKWARD_WEIGHT:
                trained = self._trained(compute, seat)
                return self._overflown(compute, passes.backward(compute, of, trained), seat, step)
            case Action.UPDATE:
                return _update(compute, of, scale, scalars)
            case Action.NORM:
                return [self._squares(compute, of(Role.GRADIENT), seat)]
            case Action.AMAX:  # exact numbers are not scaled
                return [np.zeros_like(each) for each in of(Role.OUTPUT)]
            case Action.FINITE:
                return [np.array([_is_bad(of(Role.GRADIENT))])]
            case Action.UNSCALE:
                below = inverse(number(scale))
                return [product(each, below) for each in of(Role.GRADIENT)]
            case Action.CLIP:
                assert isinstance(compute.rule, ClipNorm)
                squares = float(of(Role.INPUT)[0][0])
                return [
                    stand_in.clipped(compute.rule, squares, each, scale)
                    for each in of(Role.GRADIENT)
                ]
            case Action.INITIALIZE:
                return [self._initial(operand.view, seat) for operand in compute.operands]
            case Action.LOAD:
                replica = replica_of(self.schedule, seat.coordinates)
                return [
                    data(replica, step, compute.micro_batch, len(each)) for each in of(Role.OUTPUT)
                ]
            case Action.COMPRESS | Action.DECOMPRESS | Action.RESIDUAL:
                raise ValueError(f"{compute.id}: a factor has too few numbers for its gradient")
            case _:
                assert_never(compute.action)

    def _trained(self, compute: Compute, seat: Seat) -> list[bool]:
        """Return whether each parameter that a backward reads, in order, has a gradient."""
        found: list[bool] = []
        for operand in compute.operands:
            if operand.role is Role.PARAMETER:
                start, size = self.schedule.extent(operand.view, seat.coordinates)
                held = self.fragments(seat.program.by_name[operand.view.buffer], seat)
                names = {
                    each.parameter
                    for each in held
                    if each.position < start + size and start < each.position + each.size
                }
                found.append(self._untrained.isdisjoint(names))
        return found

    def _overflown(
        self, compute: Compute, made: Sequence[Numbers], seat: Seat, step: int
    ) -> Sequence[Numbers]:
        """Return the outputs of a backward with planted and overflowed gradients."""
        first = replica_of(self.schedule, seat.coordinates) == 0
        if step in self._overflow_steps and compute.micro_batch == 0 and first:
            return [np.where(np.isnan(each), each, NOT_FINITE) for each in made]
        for planted in self._planted:
            if planted.meets(seat.rank, step, compute):
                touched = zip(compute.operands, accesses(compute), strict=True)
                roles = [operand.role for operand, access in touched if access.writes]
                pairs = zip(roles, made, strict=True)
                gradients = [each for role, each in pairs if role is Role.GRADIENT]
                some = slice(None) if planted.gradient is None else planted.gradient
                chosen = gradients[some] if isinstance(some, slice) else gradients[some : some + 1]
                for each in chosen:
                    each[slice(None) if planted.element is None else planted.element] = NOT_FINITE
        return made

    def _squares(self, compute: Compute, gradients: Sequence[Numbers], seat: Seat) -> Numbers:
        """Return the sum of squares, with each logical element counted once."""
        total = 0.0
        views = (each.view for each in compute.operands if each.role is Role.GRADIENT)
        for view, gradient in zip(views, gradients, strict=True):
            total += dot(product(gradient, gradient), self._counts(view, seat))
        return reduced(np.array([total]))

    def _counts(self, view: View, seat: Seat) -> Numbers:
        """Return 1 for each element of `view` that a norm counts on this rank, else 0."""
        key = (view, seat.rank)
        found = self._counted.get(key)
        if found is None:
            buffer = seat.program.by_name[view.buffer]
            whole = np.ones(buffer.elements)
            if buffer.layout is not None:
                pieces = self.schedule.layout_by_name[buffer.layout].pieces
                copied = {
                    piece.parameter for piece in pieces if not is_counted(piece, seat.coordinates)
                }
                for each in self.fragments(buffer, seat):
                    if each.parameter in copied:
                        whole[each.position : each.position + each.size] = 0
            start, size = self.schedule.extent(view, seat.coordinates)
            found = self._counted[key] = whole[start : start + size]
        return found

    def _initial(self, view: View, seat: Seat) -> Numbers:
        buffer = seat.program.by_name[view.buffer]
        whole = self.whole_initial(buffer, seat)
        start, size = self.schedule.extent(view, seat.coordinates)
        return whole[start : start + size]

    def whole_initial(self, buffer: Buffer, seat: Seat) -> Numbers:
        """Return the initial values of all of `buffer`, with zeros in the padding."""
        whole = np.zeros(buffer.elements)
        if buffer.layout is None:
            return whole
        layout = self.schedule.layout_by_name[buffer.layout]
        pieces = {piece.parameter: piece for piece in layout.pieces}
        for each in self.fragments(buffer, seat):
            piece = pieces[each.parameter]
            part = part_of(self.schedule, piece, seat.coordinates)
            elements = self._elements.get(each.parameter, piece.size)
            values = initial(each.parameter, elements, part)
            where = slice(each.position, each.position + each.size)
            whole[where] = values[each.offset : each.offset + each.size]
        return whole

    def meet(
        self, members: Sequence[Communication], sources: Sequence[Numbers]
    ) -> Sequence[Numbers]:
        """Return the result of each member; see `Values.meet`."""
        return [received(members, place, sources, reduced_by) for place in range(len(members))]


def shared(
    source: Sequence[Fragment], target: Sequence[Fragment]
) -> Iterator[tuple[int, int, int]]:
    """Yield positions in source and target, and sizes, of parameter parts that both hold."""
    for there in target:
        for here in source:
            low = max(here.offset, there.offset)
            high = min(here.offset + here.size, there.offset + there.size)
            if here.parameter == there.parameter and low < high:
                first = here.position + low - here.offset
                yield first, there.position + low - there.offset, high - low


def _is_bad(gradients: Sequence[Numbers]) -> float:
    """Return 1 if a gradient is infinite, 0 if none is, and NaN if one contains NaN."""
    if any(np.count_nonzero(np.isnan(each)) for each in gradients):
        return float("nan")
    return float(any(np.count_nonzero(np.isinf(each)) for each in gradients))


def _update(
    compute: Compute,
    of: Callable[[Role], list[Numbers]],
    step: float,
    scalars: Mapping[str, float],
) -> Sequence[Numbers]:
    (gradient,) = of(Role.GRADIENT)
    (trained,) = of(Role.MASTER) + of(Role.PARAMETER)
    rule = compute.rule
    assert isinstance(rule, Optimizer)
    rate, states = rate_of(rule, scalars), of(Role.MOMENT)
    made = stand_in.updated(rule, gradient, trained, states, rate=rate, step=step)
    new, moments = made[0], iter(made[1:])
    return [
        next(moments) if operand.role is Role.MOMENT else new
        for operand in compute.operands
        if operand.role is not Role.GRADIENT
    ]
