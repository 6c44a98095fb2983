"""How many allocate/free pairs a second the simulated caching allocator handles.

    python -m benchmarks.allocator

On what one rank asks for in several ZeRO-3 steps of 96 layers (step_96_layers.py) and of a GPT with
checkpoints, in the order of the book; and on drawn sizes from 32 bytes to 128 MiB that are freed in
no order. CPU seconds of one process, the least of some repetitions.
"""

import time

import numpy as np

from benchmarks.step_96_layers import model
from zsim.memory import memory_ledger
from zsim.memory.caching import CachingAllocator
from zsim.memory.expandable import ExpandableAllocator
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

TARGET_PAIRS_PER_S = 300_000
STEPS = 20
REPETITIONS = 5
LAYERS = 96
DRAWN = 60_000
"""Requests that are drawn."""


Request = tuple[str, int, str]
"""A block's name, its bytes (0: it is freed), and its stream."""


def scheduled(layers: Model, strategy: Strategy) -> list[Request]:
    """Return the requests of setup and of some steps."""
    (program,) = make_schedule(layers, strategy).programs
    found: list[Request] = []
    for entry in memory_ledger(program, STEPS):
        if entry.change_bytes > 0:
            home = program.by_name[entry.buffer].home
            found.append((entry.buffer, entry.change_bytes, home))
        elif entry.change_bytes < 0:
            found.append((entry.buffer, 0, ""))
    return found


def drawn(count: int) -> list[Request]:
    """Take and give in no order, with some 300 blocks live."""
    generator = np.random.default_rng(0)
    found: list[Request] = []
    live: list[str] = []
    for number in range(count):
        if len(live) > 300 or (live and generator.random() < 0.5):
            found.append((live.pop(int(generator.integers(len(live)))), 0, ""))
        else:
            live.append(f"b{number}")
            found.append((live[-1], int(2 ** generator.uniform(5, 27)), "s"))
    return found


def served(requests: list[Request], kind: type[CachingAllocator]) -> tuple[float, float]:
    """CPU seconds to serve a list as runs do, the least of some; and the most reserved, in GB."""
    seconds: list[float] = []
    reserved: set[int] = set()
    for _ in range(REPETITIONS):
        allocator = kind(journals=False)
        allocate, free = allocator.allocate, allocator.free
        begin = time.process_time()
        for name, size_bytes, stream in requests:
            if size_bytes:
                allocate(name, size_bytes, stream)
            else:
                free(name)
        seconds.append(time.process_time() - begin)
        reserved.add(allocator.peak_reserved_bytes)
    return min(seconds), max(reserved) / 1e9


def main() -> None:
    """Print the table."""
    transformer = gpt(
        GPT(
            layers=LAYERS,
            hidden_size=12288,
            attention_heads=96,
            sequence_length=2048,
            vocab_size=50257,
        ),
        micro_batch_size=1,
        precision=Precision.BF16,
    )
    checkpointed = Strategy(
        parallel=Parallel(data=512),
        zero=Zero(stage=3),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=Train(precision=Precision.BF16),
    )
    plain = Strategy(
        parallel=Parallel(data=512),
        zero=Zero(stage=3),
        train=Train(precision=Precision.BF16, optimizer=SGD()),
    )
    lists = {
        "96 layers": scheduled(model(), plain),
        "GPT-3 175B": scheduled(transformer, checkpointed),
        "drawn": drawn(DRAWN),
    }
    print("caching allocator     pairs  pairs/s    target  expandable  reserved  and expandable")
    for name, requests in lists.items():
        pairs = sum(not size_bytes for _, size_bytes, _ in requests)
        plain_s, plain_gb = served(requests, CachingAllocator)
        expandable_s, expandable_gb = served(requests, ExpandableAllocator)
        print(
            f"{name:<17} {pairs:>9,} {pairs / plain_s:>8,.0f} {TARGET_PAIRS_PER_S:>9,} "
            f"{pairs / expandable_s:>11,.0f} {plain_gb:>6.1f} GB {expandable_gb:>11.1f} GB"
        )


if __name__ == "__main__":
    main()
