"""A `Compute` fused with collectives of its tokens, cut where it waits for their copies.

In torch 2.13 (torch/distributed/_symmetric_memory) `_pipelined_multi_all_gather_and_consume`
multiplies the rank's own part while it copies the next one, and so on;
`_pipelined_produce_and_all2all` copies each part while it computes the next, its own part last. The
copies of a rank run in sequence. So the kernels start once the ranks have met, and the last part
waits for the last copy; copies of an output start after its first part. torch alternates the parts
between two streams; here they run in sequence. Userbuffers of Transformer Engine also run them in
sequence (`split_overlap_ag` and `split_overlap_rs`, 2.20,
transformer_engine/common/comm_gemm_overlap/comm_gemm_overlap.cpp). A product that overlaps a whole
collective there starts with it, and both end before the next kernel starts (`bulk_overlap`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zsim.cluster.cluster import Gpu
from zsim.compute.roofline import kernel_ps
from zsim.model.kernel import FusedPart, Kernel
from zsim.schedule.fusions import MAKES, Fusion


@dataclass(frozen=True, slots=True)
class FusedChunk:
    """Kernels of a `Compute` up to the next cut: their time, and how much of it moves memory.

    Before the chunk, the copies for the parts in `begun` have started and those for the parts in
    `ended` have all arrived. If `is_made`, the chunk ends the first part of the scattered output.
    """

    time_ps: int
    moving_ps: int
    begun: tuple[FusedPart, ...] = ()
    ended: tuple[FusedPart, ...] = ()
    is_made: bool = False


@dataclass(slots=True)
class _FusedCut:
    at_ps: int
    begun: FusedPart | None = None
    ended: FusedPart | None = None
    is_made: bool = False


def sum_ps(kernels: Iterable[Kernel], gpu: Gpu) -> int:
    """Return the time of the kernels that sum the received parts after a reduce-scatter."""
    return sum(kernel_ps(each, gpu) for each in kernels if each.part is FusedPart.SUM)


def chunks(kernels: Sequence[Kernel], fusion: Fusion, gpu: Gpu, *, ranks: int) -> list[FusedChunk]:
    """Return a fused `Compute` in chunks, without the kernels that sum scattered parts."""
    if fusion.scatter is not None:
        kernels = [each for each in kernels if each.part is not FusedPart.SUM]
    ends_ps = list(accumulate((kernel_ps(each, gpu) for each in kernels), initial=0))
    cuts = sorted(_cuts(kernels, fusion, ends_ps, ranks), key=lambda each: each.at_ps)
    found: list[FusedChunk] = []
    begin, last = _FusedCut(0), ends_ps[-1]
    begun, ended = list[FusedPart](), list[FusedPart]()
    for cut in [*cuts, _FusedCut(last)]:
        if cut.at_ps > begin.at_ps or cut.is_made or cut.at_ps == last:
            span = begin.at_ps, cut.at_ps
            moving_ps = _moving_ps(kernels, ends_ps, span)
            time_ps = span[1] - span[0]
            found.append(FusedChunk(time_ps, moving_ps, tuple(begun), tuple(ended), cut.is_made))
            begun, ended, begin = [], [], cut
        begun += [] if cut.begun is None else [cut.begun]
        ended += [] if cut.ended is None else [cut.ended]
    return found


def _cuts(
    kernels: Sequence[Kernel], fusion: Fusion, ends_ps: Sequence[int], ranks: int
) -> Iterator[_FusedCut]:
    """Yield the cuts between kernels; kernel i ends at `ends_ps[i + 1]`."""
    for part in fusion.gathers:
        places = [place for place, each in enumerate(kernels) if each.part is part]
        taken_ps = sum(ends_ps[place + 1] - ends_ps[place] for place in places)
        rounds = min(ranks, len(places))  # several layers have a kernel in each
        last_ps = 0 if part is FusedPart.BESIDE_GATHER else taken_ps // rounds
        yield _FusedCut(ends_ps[places[0]], begun=part)
        yield _FusedCut(ends_ps[places[-1] + 1] - last_ps, ended=part)
    if fusion.scatter is not None:
        first = next(i for i, each in enumerate(kernels) if each.part in MAKES)
        beside = kernels[first].part is FusedPart.BESIDE_SCATTER
        yield _FusedCut(ends_ps[first if beside else first + 1], is_made=True)


def _moving_ps(kernels: Sequence[Kernel], ends_ps: Sequence[int], span: tuple[int, int]) -> int:
    """Return the time within `span` in which kernels run that only move memory."""
    total = 0
    for place, kernel in enumerate(kernels):
        if not kernel.kind.multiplies_matrices:
            begin_ps, end_ps = max(span[0], ends_ps[place]), min(span[1], ends_ps[place + 1])
            total += max(0, end_ps - begin_ps)
    return total
