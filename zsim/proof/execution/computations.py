"""Computations on exact numbers: the results of each action from its inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np

from zsim.proof.execution.collective_runner import UnfollowedError
from zsim.proof.execution.contents import Contents
from zsim.proof.execution.datum import Datum, anywhere, either, first, like, read
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.measures import Measures
from zsim.proof.execution.moves import Moves
from zsim.proof.execution.row_segments import RowSegments
from zsim.proof.execution.split_segments import SplitSegments
from zsim.proof.execution.tensors import NOTHING, Tensors
from zsim.schedule.operation import OF_SEGMENTS, Action, Compute, Role, View
from zsim.specification import stand_ins
from zsim.specification.residues import Numbers, Random, number, product, share, total
from zsim.specification.step import PlainStep
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer, settled

Makes = list[Datum | None]


class Kernels:
    """Runs computations of all classes; `initial` holds the parameters at the start of setup.

    Gradients that are not finite are tracked if training `overflows`, whether or not the schedule
    tests for them, and if the schedule tests for them without need.
    """

    def __init__(
        self,
        tensors: Tensors,
        moves: Moves,
        *,
        random: Random,
        plain: PlainStep,
        initial: Mapping[str, Numbers],
        overflows: bool,
    ) -> None:
        self.tensors = tensors
        self.moves = moves
        last = plain.model.units[-1]
        self.begins_backward = (last.name, len(last.segments) - 1) if overflows else None
        self.random = random
        self.plain = plain
        self.initial = initial
        self.divisor = 1
        self.judges = True
        self.explains = False
        self.means: Mapping[str, Numbers] = {}
        self.contents = Contents(tensors, moves, plain.cut)
        self.segments = SplitSegments(self.contents, random, plain)
        self.rows = RowSegments(tensors.schedule, plain.model, random, plain.cut.kinds)
        trained = {
            unit.name: [plain.model.trained_of(each) for each in unit.segments]
            for unit in plain.model.units
        }
        self.measures = Measures(
            tensors, moves, self.contents, trained=trained, micro_batches=plain.micro_batches
        )
        self.tests_overflow = any(
            isinstance(operation, Compute) and operation.action is Action.FINITE
            for program in tensors.schedule.programs
            for operation in program.patterns
        )
        self.follows_overflow = overflows or self.tests_overflow

    def begin(self, plain: PlainStep, means: Mapping[str, Numbers]) -> None:
        """Reset for a run that is compared with `plain`, whose mean gradients are `means`."""
        self.plain = plain
        self.means = means
        self.segments.begin(plain)
        self.measures.required[:] = 0

    def run(
        self,
        ranks: RankArray,
        compute: Compute,
        operands: Sequence[Datum],
        scalars: Mapping[str, float],
        *,
        in_setup: bool,
    ) -> Makes:
        """Return the new values of each operand; None for operands that are only read."""
        segment = self.rows.segment(compute)
        if segment is None:
            made = self._run(ranks, compute, operands, scalars, in_setup=in_setup)
        else:
            made, gradients = self.rows.run(ranks.program, compute, segment, operands)
            if self.follows_overflow and gradients:
                self.measures.mark(ranks, compute, gradients)
        if self.rows.drops and compute.action in OF_SEGMENTS:
            return self.rows.kept(ranks.program, compute, made)
        return made

    def _run(
        self,
        ranks: RankArray,
        compute: Compute,
        operands: Sequence[Datum],
        scalars: Mapping[str, float],
        *,
        in_setup: bool,
    ) -> Makes:
        def of(role: Role) -> list[Datum]:
            pairs = zip(compute.operands, operands, strict=True)
            return [datum for operand, datum in pairs if operand.role is role]

        scale = scalars[compute.scalars[0]] if compute.scalars else None
        match compute.action:
            case Action.FORWARD | Action.RECOMPUTE:
                return self.segments.forward(ranks, compute, operands)
            case Action.BACKWARD | Action.BACKWARD_WEIGHT as action:
                is_whole = action is Action.BACKWARD
                run = self.segments.backward if is_whole else self.segments.backward_weight
                made, gradients = run(ranks, compute, operands)
                if self.follows_overflow:
                    self.measures.mark(ranks, compute, gradients)
                return made
            case Action.BACKWARD_INPUT:
                return self.segments.backward_input(ranks, compute, operands)
            case Action.UPDATE:
                return self._update(ranks, compute, operands, of, scalars=scalars)
            case Action.NORM:
                return self.measures.norm(ranks, compute, operands)
            case Action.FINITE:
                return self.measures.finite(ranks, compute, operands)
            case Action.AMAX | Action.RESIDUAL:
                # exact numbers are not scaled (`zsim.proof.scales` checks scales); errors are
                # taken to add up to zero over all ranks
                return _made(compute, operands, zeros, role=Role.OUTPUT)
            case Action.COMPRESS | Action.DECOMPRESS:
                return self._compressed(compute, operands)
            case Action.UNSCALE:
                below = share(scale or 1.0, len(ranks.shape) + 2)
                return _made(
                    compute,
                    operands,
                    lambda each: like((each,), product(each.values, below)),
                    role=Role.GRADIENT,
                )
            case Action.CLIP:
                return self._clip(compute, operands, of, scale or 1.0)
            case Action.INITIALIZE:
                return [self._initialize(ranks, operand.view) for operand in compute.operands]
            case Action.LOAD:
                return self._load(ranks, compute, operands, in_setup=in_setup)
            case _:
                assert_never(compute.action)

    def is_unscaled(self, slope: Datum) -> bool:
        """Return True if the gradient of a loss is not scaled.

        It may be scaled by a share of the loss scale: that of a micro-batch, or of a replica.
        """
        shares = {1, self.plain.micro_batches, self.divisor}
        shares.add(max(1, self.divisor // self.plain.micro_batches))
        return not self.moves.is_scaled(slope.values, shares)

    def _compare_gradient(self, ranks: RankArray, compute: Compute, gradient: Datum) -> None:
        """Record the gradient that an update reads if it differs from that of plain training."""
        for operand in compute.operands:
            if operand.role not in (Role.MASTER, Role.PARAMETER) or not self.means:
                continue
            buffer = operand.view.buffer
            index = self.tensors.index(ranks, operand.view)
            is_piece = self.moves.pieces(ranks, buffer) != NOTHING
            wanted = self.contents.content(ranks, buffer, self.means)
            # all ranks may have to hold equal numbers, and yet differ in which are pieces
            shape = np.broadcast_shapes(is_piece.shape, wanted.shape[1:])
            wanted = np.broadcast_to(wanted, (len(wanted), *shape))
            shown = read(Datum(wanted, np.broadcast_to(is_piece, shape)), index)
            apart = (gradient.values != shown.values).any(axis=0)
            if shown.undefined is not None:  # here the mark of places that are pieces
                apart = apart & shown.undefined
            if apart.any():
                self.segments.note(ranks, compute, gradient, role=Role.GRADIENT)
            return

    def _update(
        self,
        ranks: RankArray,
        compute: Compute,
        operands: Sequence[Datum],
        of: Callable[[Role], list[Datum]],
        *,
        scalars: Mapping[str, float],
    ) -> Makes:
        rule = compute.rule
        assert isinstance(rule, Optimizer)
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
        if len({each.count for each in touched}) > 1:
            raise UnfollowedError(f"{compute.id}: its operands are cut differently")
        values = stand_ins.updated(
            self.random,
            settled(rule, scalars),
            [each.values for each in touched],
            scalars[compute.scalars[0]] if rule.counts_steps and compute.scalars else None,
        )
        if self.explains and not self.segments.departures:
            self._compare_gradient(ranks, compute, gradients[0])
        marked = like(touched, values[0])
        made = [replace(marked, values=each) for each in values]
        moments = iter(made[1:])
        found: Makes = []
        for operand in compute.operands:
            if operand.role is Role.GRADIENT:
                found.append(None)
            else:
                found.append(next(moments) if operand.role is Role.MOMENT else made[0])
        return found

    def _clip(
        self,
        compute: Compute,
        operands: Sequence[Datum],
        of: Callable[[Role], list[Datum]],
        scale: float,
    ) -> Makes:
        assert isinstance(compute.rule, ClipNorm)
        squares = of(Role.INPUT)[0]
        factor = stand_ins.clipping(self.random, compute.rule, squares.values, scale)
        bad = anywhere(squares)

        def clipped(datum: Datum) -> Datum:
            made = like((datum,), product(datum.values, factor))
            if bad is not None:
                every = np.broadcast_to(bad, (*bad.shape[:-1], datum.count))
                made.undefined = either(made.undefined, every)
            return made

        return _made(compute, operands, clipped, role=Role.GRADIENT)

    def _compressed(self, compute: Compute, operands: Sequence[Datum]) -> Makes:
        """Return a factor, or the product of two, as if factors lost nothing.

        A factor is the gradient plus a number that depends on the factor it was multiplied by;
        the product takes the same number away (docs/adr/0055-factors-of-powersgd-are-exact.md).
        """
        *read, target = operands
        lost, source = read if compute.action is Action.DECOMPRESS else read[::-1]
        factor, gradient = source.count, target.count
        if compute.action is Action.COMPRESS:
            factor, gradient = gradient, factor
        if gradient > factor:
            raise UnfollowedError(f"{compute.id}: a factor is cut less often than its gradient")
        seen = stand_ins.digest(self.random, "factor", lost.values)
        hidden = stand_ins.function(self.random, "factor", seen, factor)
        if compute.action is Action.DECOMPRESS:
            hidden = product(hidden, number(-1, hidden.ndim))
        source = first(source, target.count)
        made = like((source,), total(source.values, hidden[..., : target.count]))
        return [*(None for _ in read), made]

    def _initialize(self, ranks: RankArray, view: View) -> Datum:
        index = self.tensors.index(ranks, view)
        if ranks.program.by_name[view.buffer].layout is None:
            return Datum(self.random.draw((*ranks.shape, index.count)))
        return read(Datum(self.contents.content(ranks, view.buffer, self.initial)), index)

    def _load(
        self, ranks: RankArray, compute: Compute, operands: Sequence[Datum], *, in_setup: bool
    ) -> Makes:
        known = compute.micro_batch < self.plain.micro_batches and not in_setup
        batch = self.plain.batches[compute.micro_batch if known else 0]

        def loaded(datum: Datum) -> Datum:
            if not self.judges:
                return Datum(self.random.draw((*ranks.shape, datum.count)))
            if known and batch.shape[-1] == datum.count:
                return Datum(self.contents.within(ranks, batch))
            return Datum(datum.values, np.ones(datum.values.shape[1:], bool))

        return _made(compute, operands, loaded, role=Role.OUTPUT)


def zeros(datum: Datum) -> Datum:
    """Return zeros in the shape of `datum`."""
    return Datum(np.zeros_like(datum.values))


def _made(
    compute: Compute, operands: Sequence[Datum], make: Callable[[Datum], Datum], *, role: Role
) -> Makes:
    """Return the results of `make` for operands of `role`; None for others, which are only read."""
    pairs = zip(compute.operands, operands, strict=True)
    return [make(datum) if operand.role is role else None for operand, datum in pairs]
