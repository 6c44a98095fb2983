"""Fast replay of segments that run as in the plain step, on another micro-batch.

Micro-batches run a segment on different inputs and the same parameters. Once a segment has read
the plain step's parameters in some buffers, it does so again while these hold the same data. Only
inputs and gradients of outputs remain to compare, which are the same array objects as in the plain
step if nothing is wrong. If they are not, or if only part of a buffer is read, the segment is not
replayed but runs like any computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import NamedTuple

from zsim.proof.execution.class_memory import BufferWrite
from zsim.proof.execution.datum import Datum, unwritten
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.segments import Segments
from zsim.proof.execution.tensors import Index, Tensors
from zsim.schedule.operation import Action, Compute, Operand, Role
from zsim.specification.residues import Numbers
from zsim.specification.step import Application

REPLAYED = frozenset({Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD})
"""Actions that are replayed; the two parts of a split backward run like any computation."""

Buffers = dict[str, Datum]
Named = tuple[tuple[str, Index], ...]
"""Buffers of operands, and the operands' places in them."""


class SegmentWrites(NamedTuple):
    """Values that a segment makes, by buffer, and the gradients of parameters among them."""

    writes: list[BufferWrite]
    gradients: list[Datum]


@dataclass(slots=True)
class _ReadParameters:
    """Parameters that a segment reads: their buffers, and the data in these at the last run.

    `wanted` are the plain step's parameters, equal to that data; nothing is known while `held` is
    None.
    """

    buffers: tuple[str, ...]
    held: tuple[Datum | None, ...] | None = None
    wanted: Sequence[Numbers] = ()


@dataclass(frozen=True, slots=True)
class _Template:
    """A segment's operands, shared by all micro-batches with the same buffers."""

    operands: tuple[Operand, ...]
    parameters: _ReadParameters
    reads: Named
    counts: tuple[int, int, int]
    saved: tuple[int, ...]
    makes: Named
    gradients: int
    workspaces: Named


class SegmentReplay:
    """Replays segments of all classes."""

    def __init__(self, tensors: Tensors, segments: Segments) -> None:
        self._tensors = tensors
        self._segments = segments
        self._dimensions = len(tensors.grid.axes)
        self._templates: dict[tuple[int, int, Action], _Template | None] = {}
        self._parameters: dict[tuple[int, ...], _ReadParameters] = {}

    def run(
        self, ranks: RankArray, compute: Compute, run: Application, buffers: Buffers
    ) -> SegmentWrites | None:
        """Return the writes of a segment that runs as in `run`; None if that is not known."""
        template = self._template(ranks, compute)
        if template is None:
            return None
        known = template.parameters
        if known.held is None or not _same(run.parameters, known.wanted):
            return None
        for name, datum in zip(known.buffers, known.held, strict=True):
            if buffers.get(name) is not datum:
                return None
        if bool(template.saved) != (run.saved is not None):
            return None
        saved = self._segments.repeated(run.saved, template.saved)
        if compute.action is Action.BACKWARD:
            wanted: tuple[Sequence[Numbers], ...] = (run.kept, saved, run.slopes)
            made = run.made
        else:
            wanted, made = (run.inputs, (), ()), [*run.outputs, *saved]
        if template.counts != tuple(map(len, wanted)) or len(template.makes) != len(made):
            return None
        within = self._segments.contents.within
        for (name, _), numbers in zip(template.reads, chain(*wanted), strict=True):
            datum = buffers.get(name)
            if datum is None or datum.undefined is not None:
                return None
            if datum.values is not within(ranks, numbers):
                return None
        writes: list[BufferWrite] = []
        for (name, index), numbers in zip(template.makes, made, strict=True):
            if numbers.shape[-1] != index.count:
                return None
            writes.append((name, index, Datum(within(ranks, numbers))))
        gradients = [datum for _, _, datum in writes[: template.gradients]]
        for name, index in template.workspaces:
            writes.append((name, index, unwritten(self._dimensions, index.count)))
        return SegmentWrites(writes, gradients)

    def learn(self, ranks: RankArray, compute: Compute, run: Application, buffers: Buffers) -> None:
        """Record that a segment, before it writes, reads from `buffers` the parameters of `run`."""
        template = self._template(ranks, compute)
        if template is not None:
            known = template.parameters
            known.held = tuple([buffers.get(name) for name in known.buffers])
            known.wanted = tuple(run.parameters)

    def _template(self, ranks: RankArray, compute: Compute) -> _Template | None:
        """Return the template of operands, cached; None if part of a buffer is read."""
        key = (ranks.index, id(compute.operands), compute.action)
        if key not in self._templates:
            self._templates[key] = self._made(ranks, compute)
        return self._templates[key]

    def _made(self, ranks: RankArray, compute: Compute) -> _Template | None:
        operands = compute.operands
        found: list[tuple[str, Index]] = []
        parts: dict[str, int] = {}
        for operand in operands:
            index, buffer = self._tensors.index(ranks, operand.view), operand.view.buffer
            if not index.is_whole and operand.role is not Role.PARAMETER:
                # Only gradients may be parts of a buffer, in ascending order without overlap.
                if operand.role is not Role.GRADIENT or index.low < parts.get(buffer, 0):
                    return None
                if index.take is not None:
                    return None
                parts[buffer] = index.high
            found.append((buffer, index))
        if any(index.is_whole and buffer in parts for buffer, index in found):
            return None
        read = [each for each in operands if each.role is Role.PARAMETER]
        key = (ranks.index, *map(id, read))
        known = self._parameters.get(key)
        if known is None:
            buffers = tuple([each.view.buffer for each in read])
            known = self._parameters[key] = _ReadParameters(buffers)
        places = self._segments.positions(compute)
        reads = [place for place in places.reads if operands[place].role is not Role.PARAMETER]
        if compute.action is Action.BACKWARD:  # inputs, saved, parameters, gradients
            counts = (places.counts[0], places.counts[1], places.counts[3])
        else:
            counts = (places.counts[0], 0, 0)
        return _Template(
            operands=operands,
            parameters=known,
            reads=tuple([found[place] for place in reads]),
            counts=counts,
            saved=tuple([found[place][1].count for place in places.saved]),
            makes=tuple([found[place] for place in places.makes]),
            gradients=len(places.gradients),
            workspaces=tuple([found[place] for place in places.workspaces]),
        )


def _same(some: Sequence[Numbers], others: Sequence[Numbers]) -> bool:
    """Return True if both contain the same array objects."""
    return len(some) == len(others) and all(map(is_, some, others))
