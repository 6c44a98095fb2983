"""Scales of weights that FSDP2 gathers in 8-bit floats: their largest magnitudes over all ranks.

After each update one kernel measures the shards of a rank, and one all-reduce makes the magnitudes
those of whole weights, for all gathers of the next step: `precompute_float8_dynamic_scale_for_fsdp`
(torchao 0.19, torchao/float8/fsdp_utils.py), a hook of the optimizer in torchtitan. Weights that
ranks of a tensor axis have parts of are reduced over that axis, too.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from zsim.dtype import DType
from zsim.model.kernel import KernelKind, streaming
from zsim.runtimes.fsdp2.gather import GatheredPart
from zsim.runtimes.wrapping import WrappedStep
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, Reduction, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.zero.names import DATA, TENSOR

AMAX = "amax"


class WeightScales:
    """Writes what the scales are made of, where some weights are gathered in 8-bit floats.

    Attributes:
        ready: the last operation of a step that casts of the next one need.
    """

    def __init__(self, step: WrappedStep, parts: Sequence[tuple[GatheredPart, ...]]) -> None:
        self._writer = step.writer
        self._parallel = step.strategy.parallel
        self._dtype = step.strategy.train.precision.optimizer
        ranks = self._parallel.data
        names = {
            piece.parameter
            for own in parts
            for each in own
            if each.dtype is DType.FP8
            for piece in each.bucket.layout.pieces
        }
        self._shards = [
            View(buffer=state.parameter, start=start // ranks, size=(end - start) // ranks)
            for kept, state in zip(step.kept.all, step.states, strict=True)
            for piece, (start, end) in zip(kept.layout.pieces, _blocks(kept.layout), strict=True)
            if piece.parameter in names
        ]
        updated = f"step/update/{step.kept.trained[-1].name}/update"
        self._over = [
            (axis, f"{AMAX}/reduce/{axis}")
            for axis, count in ((DATA, ranks), (TENSOR, self._parallel.tensor))
            if count > 1
        ]
        self.ready = updated
        if self._shards:
            last = self._over[-1][1] if self._over else AMAX
            self.ready = f"step/update/{last}"

    def write(self, prefix: str) -> None:
        """Measure the weights and reduce what was found, in memory that stays; nothing if none."""
        if not self._shards:
            return
        writer, count = self._writer, len(self._shards)
        writer.prefix = prefix
        writer.buffer(AMAX, count, self._dtype, Kind.WORKSPACE)
        if AMAX not in writer.alive:
            writer.persist(AMAX)
        elements = sum(each.size for each in self._shards)
        writer.compute(
            AMAX,
            Action.AMAX,
            [*((Role.PARAMETER, each) for each in self._shards), (Role.OUTPUT, writer.all(AMAX))],
            kernels=(streaming(KernelKind.ELEMENTWISE, (elements,), self._dtype, streams=1),),
        )
        for axis, path in self._over:
            writer.all_reduce(path, axis, AMAX, reduction=Reduction.MAX, stream=COMPUTE)


def _blocks(layout: Layout) -> Iterable[tuple[int, int]]:
    """Return where each parameter of a group begins and ends, with its padding."""
    return pairwise((*(layout.blocks or ()), layout.elements))
