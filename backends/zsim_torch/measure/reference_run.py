"""Reference steps: small transformers that our executor trains on the ranks at hand.

Their sizes lie around those at which a kernel's launch, its arithmetic and its bytes each count, so
that the costs of operations can be told apart. Stages 0 and 3 have every kind of operation of a
step; the update is that of Adam.
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
from zsim_torch.measure.ladder import LADDER, Ladder

STAGES: Final = (0, 3)
SEQUENCES: Final = 2
VOCABULARY: Final = 256
BUCKET_ELEMENTS: Final = 500_000
MEMORY_BYTES: Final = 2**40
"""More than a reference run can need: it is not judged by memory."""


def reference_jobs(ranks: int, ladder: Ladder = LADDER) -> tuple[Job, ...]:
    """Return the runs, the smallest first."""
    return tuple(
        _job(shape, stage, ranks=ranks, steps=ladder.steps)
        for shape, stage in product(ladder.shapes, STAGES)
    )


def _job(shape: tuple[int, int, int], stage: int, *, ranks: int, steps: int) -> Job:
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
        zero=Zero(stage=stage, bucket_elements=BUCKET_ELEMENTS),
        train=Train(optimizer=Adam(learning_rate=1e-3)),
    )
    schedule = make_schedule(model, strategy)
    cluster = unknown_cluster("ranks at hand", ranks, memory_bytes=MEMORY_BYTES)
    return Job(schedule=schedule, model=model, cluster=cluster, steps=steps)
