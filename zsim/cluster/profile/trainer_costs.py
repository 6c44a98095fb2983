"""Host costs of trainers: the Python code around a schedule.

A profile has the host cost of each kernel in PyTorch. Trainers with their own modules do more than
call kernels: random states of checkpoints, views and casts between kernels, hooks, bookkeeping of a
pipeline. This takes a fixed time for each pass over a block, independent of its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zsim.units import PICOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCosts:
    """Costs that a trainer adds to the host costs of a profile.

    Attributes:
        unit_ps: picoseconds of the host for each forward, recompute or backward of a unit.
        segment_ps: the same for each segment of a unit.
        collective_ps: picoseconds of the host for each collective; None to use the profile's.
        rests_on: short names of the publications that they were fitted to.
    """

    unit_ps: int = 0
    segment_ps: int = 0
    collective_ps: int | None = None
    rests_on: tuple[str, ...] = ()


PLAIN = TrainerCosts()
"""PyTorch's own wrappers, and every trainer with unknown costs."""

_MS = PICOSECONDS_PER_SECOND // 1000

TRAINERS: Mapping[str, TrainerCosts] = {
    # Megatron-LM with PyTorch 2.0, 2023: vTrain's iterations on one node of A100 (Bang et al.,
    # MICRO 2024, arXiv 2312.12391; github.com/VIA-Research/vTrain, data/ground_truth_single.csv),
    # the rows of width 1,024, which are fitted and do not judge. With micro-batches of one, a block
    # takes 3.5 to 3.7 ms over forward, recompute and backward, of which issuing kernels takes 0.5;
    # with four tensor ranks, and so six more collectives, it takes 0.14 ms longer.
    "megatron": TrainerCosts(
        unit_ps=94 * _MS // 100, collective_ps=24 * _MS // 1000, rests_on=("vTrain",)
    ),
    # nanotron of early 2025: the Ultra-Scale Playbook's sweep, rows of 3B without a pipeline, which
    # are fitted and do not judge. With micro-batches of one and tensor 4 or 8, every micro-batch
    # takes 4.5 ms for each block, independent of its size.
    "nanotron": TrainerCosts(segment_ps=28 * _MS // 100, rests_on=("Ultra-Scale Playbook",)),
}
"""Costs by the name of the emulated runtime."""
