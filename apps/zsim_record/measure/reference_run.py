"""Reference steps: small transformers that our executor trains on the ranks of this machine.

Their sizes are around those at which a kernel's launch, its arithmetic and its bytes dominate, so
that these costs can be separated. Stages 0 and 3 contain every kind of operation of a step; the
optimizer is Adam. Two settings compute nothing during collectives and give the costs of operations;
the time that kernels lose to a collective is measured separately. The third overlaps collectives
with computation, as a training does, and gives the host's overhead.
"""

from itertools import product
from typing import Final

from zsim.backend.backend import Job
from zsim.cluster.cluster import unknown_cluster
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import FusedBuffers
from zsim_record.measure.ladder import LADDER, Ladder

BUCKET_ELEMENTS: Final = 500_000
SETTINGS: Final = (
    Zero(stage=0, fused_buffers=FusedBuffers.MODEL),
    Zero(stage=3, bucket_elements=BUCKET_ELEMENTS, prefetch_units=0, reductions_in_flight=0),
    Zero(stage=3, bucket_elements=BUCKET_ELEMENTS),
)
SEQUENCES: Final = 2
VOCABULARY: Final = 256
MEMORY_BYTES: Final = 2**40
"""More than a reference run can need, so that memory never limits it."""


def reference_jobs(ranks: int, ladder: Ladder = LADDER) -> tuple[Job, ...]:
    """Return the runs, the smallest first."""
    return tuple(
        _job(shape, zero, ranks=ranks, steps=ladder.steps)
        for shape, zero in product(ladder.shapes, SETTINGS)
    )


def _job(shape: tuple[int, int, int], zero: Zero, *, ranks: int, steps: int) -> Job:
    layers, hidden, length = shape
    model = gpt(
        GPT(
            layers=layers,
            hidden_size=hidden,
            attention_heads=4,
            sequence_length=length,
            vocab_size=VOCABULARY,
        ),
        micro_batch_size=SEQUENCES,
    )
    strategy = Strategy(
        parallel=Parallel(data=ranks),
        zero=zero,
        train=Train(optimizer=Adam(learning_rate=1e-3)),
    )
    schedule = make_schedule(model, strategy)
    cluster = unknown_cluster("ranks at hand", ranks, memory_bytes=MEMORY_BYTES)
    return Job(schedule=schedule, model=model, cluster=cluster, steps=steps)
