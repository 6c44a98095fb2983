"""Forward and backward of segments, beside what the plain step reads and makes in them.

A segment that reads what the plain step reads makes what the plain step makes. One that reads
anything else makes numbers that are drawn for what it reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.proof.execution.contents import Contents
from zsim.proof.execution.datum import Datum, Marks, anywhere, either, unwritten
from zsim.proof.execution.grid import RunCell
from zsim.schedule.operation import Action, Compute, Role
from zsim.specification import kernel
from zsim.specification.field import Numbers, Random, product, total
from zsim.specification.step import Application, PlainStep

Makes = list[Datum | None]
Of = Callable[[Role], list[Datum]]
Reads = list[tuple[str, Datum, Numbers]]
"""Operands by name, what they hold, and what they hold in the plain step."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A segment that reads something else than in the plain step: which operand, of what kind."""

    role: str
    operation: str
    operand: str
    buffer: str
    undefined: bool


class Segments:
    """Runs segments. `departures` are the first that read something else than in the plain step."""

    def __init__(self, contents: Contents, random: Random, plain: PlainStep) -> None:
        self.contents = contents
        self.random = random
        self.plain = plain
        self.dimensions = len(contents.tensors.grid.axes) + 2
        self.departures: list[Departure] = []

    def _applications(self, compute: Compute) -> list[Application]:
        """Return the runs of a segment in the plain step, that of its micro-batch first."""
        known = self.plain.applications
        order = [compute.micro_batch, *range(self.plain.micro_batches)]
        keys = ((compute.unit, compute.segment, batch) for batch in dict.fromkeys(order))
        return [known[key] for key in keys if key in known]

    def _differs(self, cell: RunCell, datum: Datum, wanted: Numbers) -> Marks | None:
        """Return on which ranks a datum is not the numbers, (ranks..., 1); None if on none."""
        wanted = self.contents.within(cell, wanted)
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
        cell: RunCell,
        compute: Compute,
        read: Reads,
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
                self.note(cell, compute, name, datum)
            found = differs if found is None else found | differs
        return found

    def note(self, cell: RunCell, compute: Compute, name: str, datum: Datum) -> None:
        """Remember that an operand, by role and number, is another than in the plain step."""
        role, place = name.rsplit(" ", 1)
        views = [each.view for each in compute.operands if each.role == role]
        buffer = views[int(place)].buffer if int(place) < len(views) else ""
        undefined = datum.undefined is not None and bool(datum.undefined.any())
        self.departures.append(Departure(cell.program.role, compute.id, role, buffer, undefined))

    def forward(
        self,
        cell: RunCell,
        compute: Compute,
        operands: Sequence[Datum],
        of: Of,
    ) -> Makes:
        """Return what forward makes."""
        inputs, parameters = of(Role.INPUT), of(Role.PARAMETER)
        runs = self._applications(compute)
        outputs = [each.count for each in of(Role.OUTPUT)]
        saves = [each.count for each in of(Role.SAVED)]

        def reads(run: Application) -> Reads | None:
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
            made = [self.contents.within(cell, each) for each in run.outputs]
            if saves and run.saved is not None:
                saved = self.contents.within(cell, run.saved)
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
        made_of = {
            Role.OUTPUT: iter(made[: len(outputs)]),
            Role.SAVED: iter(made[len(outputs) :]),
        }
        return _in_order(compute, operands, made_of)

    def _chosen(
        self,
        cell: RunCell,
        compute: Compute,
        read: Sequence[Datum],
        runs: Sequence[Application],
        *,
        reads: Callable[[Application], Reads | None],
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
        dimensions = self.dimensions
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

    def backward(
        self,
        cell: RunCell,
        compute: Compute,
        operands: Sequence[Datum],
        of: Of,
    ) -> tuple[Makes, list[Datum]]:
        """Return what backward makes, and of that the gradients of parameters."""
        inputs, saved, parameters = of(Role.INPUT), of(Role.SAVED), of(Role.PARAMETER)
        slopes, gradients = of(Role.OUTPUT_GRADIENT), of(Role.GRADIENT)
        towards = of(Role.INPUT_GRADIENT)
        counts = [each.count for each in (*gradients, *towards)]

        def reads(run: Application) -> Reads | None:
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
            return [self.contents.within(cell, run.towards)]

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
        parts = _parts(whole, slope, anywhere(*slopes), counts)
        made_of = {
            Role.GRADIENT: iter(parts[: len(gradients)]),
            Role.INPUT_GRADIENT: iter(parts[len(gradients) :]),
        }
        return _in_order(compute, operands, made_of), parts[: len(gradients)]


def _parts(
    whole: Datum, slope: Numbers, undefined: Marks | None, counts: Sequence[int]
) -> list[Datum]:
    """Return gradients that stand one after the other in `whole`, times that of the outputs."""
    if whole.undefined is not None:
        bad = np.logical_or.reduce(whole.undefined, axis=-1, keepdims=True)
        undefined = either(undefined, bad)
    made = product(whole.values, slope)
    parts: list[Datum] = []
    start = 0
    for count in counts:
        marks = None
        if undefined is not None:
            marks = np.broadcast_to(undefined, (*undefined.shape[:-1], count))
        parts.append(Datum(made[..., start : start + count], marks))
        start += count
    return parts


def _in_order(
    compute: Compute, operands: Sequence[Datum], made: Mapping[Role, Iterator[Datum]]
) -> Makes:
    """Return what was made, in the order of operands; a workspace is left with nothing in it."""
    found: Makes = []
    for operand, datum in zip(compute.operands, operands, strict=True):
        if operand.role is Role.WORKSPACE:
            found.append(unwritten(datum.values.ndim - 2, datum.count))
        else:
            found.append(next(made[operand.role]) if operand.role in made else None)
    return found


def _paired(role: Role, data: Sequence[Datum], wanted: Sequence[Numbers]) -> Reads:
    return [
        (f"{role} {place}", datum, numbers)
        for place, (datum, numbers) in enumerate(zip(data, wanted, strict=True))
    ]
