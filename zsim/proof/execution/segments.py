"""Forward and backward of segments, compared with their inputs and outputs in the plain step.

A segment with the inputs of the plain step has the outputs of the plain step. With other inputs
its outputs are random numbers, drawn as a function of the inputs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim.proof.execution.contents import Contents
from zsim.proof.execution.datum import Datum, Marks, anywhere, either, unwritten
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.operand_places import READ, OperandPlaces
from zsim.schedule.operation import BACKWARDS, Action, Compute, Operand, Role
from zsim.specification import stand_ins
from zsim.specification.residues import Numbers, Random, product, total
from zsim.specification.step import Application, PlainStep

Makes = list[Datum | None]
ByRole = defaultdict[Role, list[Datum]]
Reads = list[tuple[Role, int, Datum, Numbers]]
"""Operands by role and number, with their data here and in the plain step."""

MADE = (Role.GRADIENT, Role.INPUT_GRADIENT)
"""Roles of the outputs of a whole backward, in order."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A segment with another input than in the plain step: which operand, of which role."""

    role: str
    operation: str
    operand: str
    buffer: str
    undefined: bool


class Segments:
    """Runs segments. `departures` lists the first operands that differ from the plain step.

    `departed` is True if any segment did not match the plain step. `is_plain` is True if the last
    one read the same array objects as the plain step.
    """

    def __init__(self, contents: Contents, random: Random, plain: PlainStep) -> None:
        self.contents = contents
        self.random = random
        self.plain = plain
        self.dimensions = len(contents.tensors.grid.axes) + 2
        self.departures: list[Departure] = []
        self.departed = self.is_plain = False
        self._equal: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}
        self._saved: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}
        self._by_operands: dict[tuple[int, Action], tuple[tuple[Operand, ...], OperandPlaces]] = {}

    def _applications(self, compute: Compute) -> Iterator[Application]:
        """Yield the runs of a segment in the plain step, that of its micro-batch first."""
        known, own = self.plain.applications, compute.micro_batch
        others = (batch for batch in range(self.plain.micro_batches) if batch != own)
        for batch in chain((own,), others):
            found = known.get((compute.unit, compute.segment, batch))
            if found is not None:
                yield found

    def begin(self, plain: PlainStep) -> None:
        """Reset for a run that is compared with `plain`."""
        self.plain = plain
        self.departures.clear()
        self._equal.clear()
        self._saved.clear()

    def _differs(self, ranks: RankArray, datum: Datum, wanted: Numbers) -> Marks | None:
        """Return the ranks on which a datum differs from `wanted`, (ranks..., 1); None if none."""
        wanted = self.contents.within(ranks, wanted)
        both = (id(datum.values), id(wanted))
        if datum.undefined is None:
            if datum.values is wanted:  # the array of the plain step itself
                return None
            if both in self._equal:  # compared before, for another micro-batch
                return None
        if datum.count != wanted.shape[-1]:
            return np.ones((1,) * (wanted.ndim - 1), bool)
        differs = datum.values != wanted
        if datum.undefined is None and not differs.any():
            self._equal[both] = datum.values, wanted  # kept alive, so that ids stay unique
            return None
        marks: Marks = differs.any(axis=0).any(axis=-1, keepdims=True)
        if datum.undefined is not None:
            marks = marks | datum.undefined.any(axis=-1, keepdims=True)
        return marks if marks.any() else None

    def note(
        self, ranks: RankArray, compute: Compute, datum: Datum, *, role: Role, place: int = 0
    ) -> None:
        """Record that an operand, given by role and number, differs from the plain step."""
        views = [each.view for each in compute.operands if each.role is role]
        buffer = views[place].buffer if place < len(views) else ""
        undefined = datum.undefined is not None and bool(datum.undefined.any())
        self.departures.append(Departure(ranks.program.role, compute.id, role, buffer, undefined))

    def forward(self, ranks: RankArray, compute: Compute, operands: Sequence[Datum]) -> Makes:
        """Return the outputs of forward, by operand."""
        known = self._as_plain(ranks, compute, operands)
        self.is_plain = known is not None
        if known is not None:
            return known
        of = by_role(compute, operands)
        outputs = [each.count for each in of[Role.OUTPUT]]
        saves = [each.count for each in of[Role.SAVED]]

        def makes(run: Application) -> list[Numbers] | None:
            is_other = [each.shape[-1] for each in run.outputs] != outputs
            if is_other or (saves and run.saved is None):
                return None
            return [*run.outputs, *self.repeated(run.saved, saves)]

        made = self._chosen(ranks, compute, of, makes, counts=[*outputs, *saves], alike=len(saves))
        split = len(outputs)
        return in_order(
            compute, operands, {Role.OUTPUT: iter(made[:split]), Role.SAVED: iter(made[split:])}
        )

    def backward(
        self, ranks: RankArray, compute: Compute, operands: Sequence[Datum]
    ) -> tuple[Makes, list[Datum]]:
        """Return the outputs of backward by operand, and the gradients of parameters among them."""
        known = self._as_plain(ranks, compute, operands)
        self.is_plain = known is not None
        if known is not None:
            at = self.positions(compute).gradients
            return known, [made for made in map(known.__getitem__, at) if made is not None]
        of = by_role(compute, operands)
        counts = [each.count for role in MADE for each in of[role]]

        def makes(run: Application) -> list[Numbers] | None:
            sizes = [high - low for low, high in zip([0, *run.ends], run.ends, strict=False)]
            return [run.towards] if sizes == counts else None

        (whole,) = self._chosen(ranks, compute, of, makes, counts=[sum(counts)], alike=0)
        slopes = of[Role.OUTPUT_GRADIENT]
        parts = self._parts_of_plain(ranks, compute, whole, slopes)
        if parts is None:
            name = f"{compute.unit}/{compute.segment}"
            slope = self.plain.slope(name, [each.values for each in slopes])
            parts = parts_of(whole, slope, anywhere(*slopes), counts)
        split = len(of[Role.GRADIENT])
        made_of = {
            Role.GRADIENT: iter(parts[:split]),
            Role.INPUT_GRADIENT: iter(parts[split:]),
        }
        return in_order(compute, operands, made_of), parts[:split]

    def _parts_of_plain(
        self, ranks: RankArray, compute: Compute, whole: Datum, slopes: Sequence[Datum]
    ) -> list[Datum] | None:
        """Return the gradients of the plain step if all their factors are equal; else None.

        `whole` is the factor of the gradients of the outputs, `slopes`. Readers of the result then
        get the array objects of the plain step.
        """
        run = self.plain.applications.get((compute.unit, compute.segment, compute.micro_batch))
        if run is None or len(run.slopes) != len(slopes):
            return None
        for datum, wanted in zip((whole, *slopes), (run.towards, *run.slopes), strict=True):
            if self._differs(ranks, datum, wanted) is not None:
                return None
        return [Datum(self.contents.within(ranks, each)) for each in run.made]

    def _as_plain(
        self, ranks: RankArray, compute: Compute, operands: Sequence[Datum]
    ) -> Makes | None:
        """Return the plain step's outputs if all inputs are the plain step's array objects.

        Returns None if an input is another array, which may still hold equal numbers.
        """
        run = self.plain.applications.get((compute.unit, compute.segment, compute.micro_batch))
        if run is None:
            return None
        at = self.positions(compute)
        saved = self.repeated(run.saved, [operands[place].count for place in at.saved])
        wanted: tuple[Sequence[Numbers], ...]
        if compute.action in BACKWARDS:
            if bool(at.saved) != (run.saved is not None):
                return None
            left = self.repeated(run.slope, [operands[each].count for each in at.intermediates])
            wanted = (run.kept, saved, run.parameters, run.slopes)
            made = run.made
            if compute.action is Action.BACKWARD_INPUT:
                made = [*left, *run.made[run.trained :]]
            elif compute.action is Action.BACKWARD_WEIGHT:
                wanted, made = (*wanted[:-1], left), run.made[: run.trained]
        elif at.saved and run.saved is None:
            return None
        else:
            wanted = (run.inputs, run.parameters)
            made = [*run.outputs, *saved]
        if len(at.makes) != len(made) or at.counts != tuple(map(len, wanted)):
            return None
        within, equal = self.contents.within, self._equal
        for place, each in zip(at.reads, chain(*wanted), strict=True):
            datum, own = operands[place], within(ranks, each)
            if datum.undefined is not None or not (
                datum.values is own or (id(datum.values), id(own)) in equal
            ):
                return None
        found: Makes = [None] * len(operands)
        for place, each in zip(at.makes, made, strict=True):
            if operands[place].count != each.shape[-1]:
                return None
            found[place] = Datum(within(ranks, each))
        for place in at.workspaces:
            datum = operands[place]
            found[place] = unwritten(datum.values.ndim - 2, datum.count)
        return found

    def positions(self, compute: Compute) -> OperandPlaces:
        """Return the places of the operands of each role, cached for all micro-batches."""
        key = (id(compute.operands), compute.action)
        found = self._by_operands.get(key)
        if found is None:
            found = self._by_operands[key] = compute.operands, OperandPlaces.of(compute)
        return found[1]

    def repeated(self, saved: Numbers | None, counts: Sequence[int]) -> list[Numbers]:
        """Return the one number that is saved, repeated for each operand that holds it."""
        if saved is None:
            return []
        found: list[Numbers] = []
        for count in counts:
            key = (id(saved), count)
            if key not in self._saved:
                self._saved[key] = saved, wide(saved, count)  # kept alive, so its id stays unique
            found.append(self._saved[key][1])
        return found

    def _reads(self, compute: Compute, of: ByRole, run: Application) -> Reads | None:
        """Return operands with their data in a run of the plain step; None if counts differ."""
        is_backward = compute.action in BACKWARDS
        wanted: list[tuple[Role, Sequence[Numbers]]] = [
            (Role.INPUT, run.kept if is_backward else run.inputs),
            (Role.PARAMETER, run.parameters),
        ]
        if is_backward:
            if bool(of[Role.SAVED]) != (run.saved is not None):
                return None
            counts = [each.count for each in of[Role.SAVED]]
            wanted.insert(1, (Role.SAVED, self.repeated(run.saved, counts)))
        if any(len(of[role]) != len(numbers) for role, numbers in wanted):
            return None
        return [
            (role, place, *pair)
            for role, numbers in wanted
            for place, pair in enumerate(zip(of[role], numbers, strict=True))
        ]

    def _differing_ranks(
        self, ranks: RankArray, compute: Compute, read: Reads, *, notes: bool
    ) -> Marks | None:
        """Return the ranks on which an operand differs from the plain step; None if none."""
        found: Marks | None = None
        for role, place, datum, wanted in read:
            differs = self._differs(ranks, datum, wanted)
            if differs is None:
                continue
            if notes and found is None:
                self.note(ranks, compute, datum, role=role, place=place)
            found = either(found, differs)
        return found

    def _chosen(
        self,
        ranks: RankArray,
        compute: Compute,
        of: ByRole,
        makes: Callable[[Application], list[Numbers] | None],
        *,
        counts: Sequence[int],
        alike: int,
    ) -> list[Datum]:
        """Return the outputs of a segment: those of the plain step on ranks with its inputs.

        Each of the last `alike` outputs is one number.
        """
        found: list[Numbers] | None = None
        roles = READ if compute.action in BACKWARDS else (Role.INPUT, Role.PARAMETER)
        read = [each for role in roles for each in of[role]]
        for number_of, run in enumerate(self._applications(compute)):
            pairs, made = self._reads(compute, of, run), makes(run)
            if pairs is None or made is None:
                continue
            made = [self.contents.within(ranks, each) for each in made]
            differs = self._differing_ranks(ranks, compute, pairs, notes=number_of == 0)
            if differs is None:
                return [Datum(each) for each in made]
            self.departed = True
            found = found or self._drawn(compute, read, counts, alike)
            found = [
                np.where(differs, old, of_run) for of_run, old in zip(made, found, strict=True)
            ]
        self.departed = True
        undefined = anywhere(*read)
        return [
            Datum(each, None if undefined is None else wide(undefined, each.shape[-1]))
            for each in found or self._drawn(compute, read, counts, alike)
        ]

    def _drawn(
        self, compute: Compute, read: Sequence[Datum], counts: Sequence[int], alike: int
    ) -> list[Numbers]:
        """Return random numbers that are a function of exactly the inputs."""
        way = "" if compute.action is Action.RECOMPUTE else compute.action
        name = f"{compute.unit}/{compute.segment} {way or Action.FORWARD}"
        seen = np.zeros((2, *(1,) * (self.dimensions - 1)), np.uint64)
        for place, datum in enumerate(read):
            seen = total(seen, stand_ins.digest(self.random, f"{name} reads {place}", datum.values))
        made: list[Numbers] = []
        for place, count in enumerate(counts):
            single = place >= len(counts) - alike
            drawn = stand_ins.function(
                self.random, f"{name} makes {place}", seen, 1 if single else count
            )
            made.append(wide(drawn, count) if single else drawn)
        return made


def wide(array: NDArray[Any], count: int) -> NDArray[Any]:
    """Return an array with the one number, or mark, of each rank repeated in `count` places."""
    wide = (*array.shape[:-1], count)
    return array if array.shape == wide else np.broadcast_to(array, wide)


def parts_of(
    whole: Datum, slope: Numbers, undefined: Marks | None, counts: Sequence[int]
) -> list[Datum]:
    """Return the gradients concatenated in `whole`, times `slope`, that of the outputs."""
    if whole.undefined is not None:
        bad = np.logical_or.reduce(whole.undefined, axis=-1, keepdims=True)
        undefined = either(undefined, bad)
    made = product(whole.values, slope)
    parts: list[Datum] = []
    start = 0
    for count in counts:
        marks = None if undefined is None else wide(undefined, count)
        parts.append(Datum(made[..., start : start + count], marks))
        start += count
    return parts


def in_order(
    compute: Compute, operands: Sequence[Datum], made: Mapping[Role, Iterator[Datum]]
) -> Makes:
    """Return outputs in the order of operands; a workspace becomes unwritten."""
    found: Makes = []
    for operand, datum in zip(compute.operands, operands, strict=True):
        if operand.role is Role.WORKSPACE:
            found.append(unwritten(datum.values.ndim - 2, datum.count))
        else:
            found.append(next(made[operand.role]) if operand.role in made else None)
    return found


def by_role(compute: Compute, operands: Sequence[Datum]) -> ByRole:
    """Return operands by role, in their order."""
    found: ByRole = defaultdict(list)
    for operand, datum in zip(compute.operands, operands, strict=True):
        found[operand.role].append(datum)
    return found
