"""Backward of segments in two parts, compared with the plain step's undivided backward.

The first part leaves one number for the second: the combined gradients of the outputs, if all
other inputs are those of the plain step. Otherwise it is multiplied by a random number, a function
of the inputs. The second part is linear in it.
"""

from collections.abc import Sequence

import numpy as np

from zsim.proof.execution.datum import Datum, anywhere
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.segments import Makes, Segments, by_role, in_order, parts_of, wide
from zsim.schedule.operation import Compute, Role
from zsim.specification.residues import Numbers, moduli, product, summed
from zsim.specification.stand_ins import shaped
from zsim.specification.step import Application


class SplitSegments(Segments):
    """Runs segments, also with a backward in two parts."""

    def backward_input(
        self, ranks: RankArray, compute: Compute, operands: Sequence[Datum]
    ) -> Makes:
        """Return the outputs of the first part: gradients of inputs, and intermediate gradients."""
        known = self._as_plain(ranks, compute, operands)
        if known is not None:
            return known
        of = by_role(compute, operands)
        counts = [each.count for each in of[Role.INPUT_GRADIENT]]
        one = np.ones((2, *(1,) * (self.dimensions - 1)), np.uint64)

        def makes(run: Application) -> list[Numbers] | None:
            own = run.towards[..., _trained_end(run) :]
            return [one, own] if _sizes(run)[run.trained :] == counts else None

        factor, whole = self._chosen(ranks, compute, of, makes, counts=[1, sum(counts)], alike=0)
        slopes = of[Role.OUTPUT_GRADIENT]
        slope = self.plain.slope(_name(compute), [each.values for each in slopes])
        undefined = anywhere(*slopes)
        (left,) = parts_of(factor, slope, undefined, [1])
        gradients = parts_of(whole, slope, undefined, counts)
        run = self._own(compute)
        if run is not None and run.slope is not None:
            left = self._settled(ranks, left, run.slope)
            if len(gradients) == len(run.made) - run.trained:
                pairs = zip(gradients, run.made[run.trained :], strict=True)
                gradients = [self._settled(ranks, *pair) for pair in pairs]
        lefts = [_widened(left, each.count) for each in of[Role.INTERMEDIATE_GRADIENT]]
        made = {
            Role.INTERMEDIATE_GRADIENT: iter(lefts),
            Role.INPUT_GRADIENT: iter(gradients),
        }
        return in_order(compute, operands, made)

    def backward_weight(
        self, ranks: RankArray, compute: Compute, operands: Sequence[Datum]
    ) -> tuple[Makes, list[Datum]]:
        """Return the outputs of the second part, and the gradients of parameters among them."""
        known = self._as_plain(ranks, compute, operands)
        if known is not None:
            at = self.positions(compute).gradients
            return known, [made for made in map(known.__getitem__, at) if made is not None]
        of = by_role(compute, operands)
        counts = [each.count for each in of[Role.GRADIENT]]

        def makes(run: Application) -> list[Numbers] | None:
            own = run.towards[..., : _trained_end(run)]
            return [own] if _sizes(run)[: run.trained] == counts else None

        (whole,) = self._chosen(ranks, compute, of, makes, counts=[sum(counts)], alike=0)
        left = of[Role.INTERMEDIATE_GRADIENT]
        gradients = parts_of(whole, self._left(compute, left), anywhere(*left), counts)
        run = self._own(compute)
        if run is not None and run.trained == len(gradients):
            pairs = zip(gradients, run.made, strict=False)
            gradients = [self._settled(ranks, *pair) for pair in pairs]
        return in_order(compute, operands, {Role.GRADIENT: iter(gradients)}), gradients

    def _own(self, compute: Compute) -> Application | None:
        """Return the run of a segment in the plain step."""
        return self.plain.applications.get((compute.unit, compute.segment, compute.micro_batch))

    def _settled(self, ranks: RankArray, datum: Datum, wanted: Numbers) -> Datum:
        """Return the plain step's array for a datum with equal numbers, else the datum."""
        if self._differs(ranks, datum, wanted) is not None:
            return datum
        return Datum(self.contents.within(ranks, wanted))

    def _left(self, compute: Compute, left: Sequence[Datum]) -> Numbers:
        """Return the number that the first part has left, linear in all of its places.

        The weights are random with sum one, so equal numbers in all places give that number.
        """
        count = sum(each.count for each in left)
        if not count:
            return np.zeros((2, *(1,) * (self.dimensions - 1)), np.uint64)
        shape = np.broadcast_shapes(*(each.values.shape[:-1] for each in left))
        whole = np.concatenate(
            [np.broadcast_to(each.values, (*shape, each.count)) for each in left], axis=-1
        )
        weights = self.random.key(f"{_name(compute)}/left", count).copy()
        others = summed(weights[:, 1:], -1)
        weights[:, 0] = (moduli(1) + np.uint64(1) - others) % moduli(1)
        return summed(product(whole, shaped(weights, whole.ndim)), -1, keepdims=True)


def _name(compute: Compute) -> str:
    return f"{compute.unit}/{compute.segment}"


def _sizes(run: Application) -> list[int]:
    """Return the number of pieces of each gradient that a run makes."""
    return [high - low for low, high in zip([0, *run.ends], run.ends, strict=False)]


def _trained_end(run: Application) -> int:
    """Return the end of the gradients of parameters among those that a run makes."""
    return run.ends[run.trained - 1] if run.trained else 0


def _widened(datum: Datum, count: int) -> Datum:
    """Return one number, and its mark, repeated in `count` places."""
    marks = None if datum.undefined is None else wide(datum.undefined, count)
    return Datum(wide(datum.values, count), marks)
