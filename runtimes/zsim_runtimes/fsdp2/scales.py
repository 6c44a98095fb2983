"""Scales of weights that FSDP2 gathers in float8: their largest magnitudes over all ranks.

After each update, one kernel measures the shards of a rank, and one all-reduce computes the
magnitudes of whole weights, for all gathers of the next step:
`precompute_float8_dynamic_scale_for_fsdp` (torchao 0.19, torchao/float8/fsdp_utils.py), an
optimizer hook in torchtitan, called once for each chunk of a pipeline stage. Weights sharded over
the tensor axis are reduced over that axis, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zsim.dtype import DType
from zsim.model.kernel import KernelKind, streaming
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, Reduction, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.zero.names import DATA, TENSOR
from zsim_runtimes.fsdp2.gather import GatheredPart
from zsim_runtimes.wrapping import WrappedStep

AMAX = "amax"


@dataclass(frozen=True, slots=True)
class Measured:
    """Shards of the weights of a model or of a chunk, and the buffer of their magnitudes."""

    name: str
    shards: tuple[View, ...]


class WeightScales:
    """Writes the computation of the scales, if some weights are gathered in float8.

    `model_parts` are ranges of units: of the model, or of the chunks of a stage.

    Attributes:
        ready: the last operation of a step that casts of the next step depend on.
    """

    def __init__(
        self,
        step: WrappedStep,
        parts: Sequence[tuple[GatheredPart, ...]],
        model_parts: Sequence[range],
    ) -> None:
        self._writer = step.writer
        self._dtype = step.strategy.train.precision.optimizer
        names = {
            piece.parameter
            for own in parts
            for each in own
            if each.dtype is DType.FP8
            for piece in each.bucket.layout.pieces
        }
        self._measured: list[Measured] = []
        for number, units in enumerate(model_parts):
            if shards := tuple(_shards(step, names, units)):
                self._measured.append(Measured(f"{AMAX}{number or ''}", shards))
        parallel = step.strategy.parallel
        ranks = {DATA: parallel.data, TENSOR: parallel.tensor}
        self._axes = [axis for axis, count in ranks.items() if count > 1]
        self.ready = f"step/update/{step.kept.trained[-1].name}/update"
        if self._measured:
            last = self._measured[-1].name
            self.ready = "/".join(["step/update", last, *(f"reduce/{a}" for a in self._axes[-1:])])

    def write(self, prefix: str) -> None:
        """Measure the weights and reduce the magnitudes, in persistent memory."""
        for each in self._measured:
            self._write(each, prefix)

    def _write(self, own: Measured, prefix: str) -> None:
        writer, name = self._writer, own.name
        writer.prefix = prefix
        writer.buffer(name, len(own.shards), self._dtype, Kind.WORKSPACE)
        if name not in writer.alive:
            writer.persist(name)
        elements = sum(each.size for each in own.shards)
        writer.compute(
            name,
            Action.AMAX,
            [*((Role.PARAMETER, each) for each in own.shards), (Role.OUTPUT, writer.all(name))],
            kernels=(streaming(KernelKind.ELEMENTWISE, (elements,), self._dtype, streams=1),),
        )
        for axis in self._axes:
            path = f"{name}/reduce/{axis}"
            writer.all_reduce(path, axis, name, reduction=Reduction.MAX, stream=COMPUTE)


def _shards(step: WrappedStep, names: set[str], units: range) -> Iterable[View]:
    """Yield a rank's shard of each weight in `names` that belongs to a group of these units."""
    ranks = step.strategy.parallel.data
    for kept, state in zip(step.kept.all, step.states, strict=True):
        if kept.units[0] not in units:
            continue
        for piece, (start, end) in zip(kept.layout.pieces, _blocks(kept.layout), strict=True):
            if piece.parameter in names:
                size = (end - start) // ranks
                yield View(buffer=state.parameter, start=start // ranks, size=size)


def _blocks(layout: Layout) -> Iterable[tuple[int, int]]:
    """Return the start and end of each parameter of a group, with its padding."""
    return pairwise((*(layout.blocks or ()), layout.elements))
