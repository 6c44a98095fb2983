"""Micro-batches that a stage of a pipeline has begun where its first backward begins.

With one chunk those that go ahead on the stages behind it, and its own (PipeDream-Flush, Narayanan
et al. 2021, section 2.2.1). With several, each takes as many micro-batches in turn as there are
stages; the first one waits for all turns but the last, and for each stage behind it there and back
(section 2.2.2), or there alone where gradients of weights fill the way back (ZB-1p, Qi et al. 2024,
arXiv 2401.10241). In a V both chunks together hold as many as two of each stage (ZB-V, ibid.
section 6).
"""

from collections.abc import Sequence

from zsim.model.pipeline_stages import Stage
from zsim.strategy.strategy import Strategy


def in_flight(stage: Stage, strategy: Strategy) -> Sequence[int]:
    """Return the micro-batches of each chunk of `stage` that are under way."""
    count, times = strategy.parallel.pipeline, strategy.train.gradient_accumulation_steps
    behind, chunks = count - 1 - stage.index, len(stage.chunks)
    if chunks == 1:
        return (min(behind + 1, times),)
    runtime = strategy.zero.emulate
    if runtime is not None and runtime.stages_in_v:
        return min(2 * behind + 1 + stage.index, times), min(stage.index + 1, times)
    turn = times // max(1, times // count)
    ways = 1 if runtime is not None and runtime.splits_backward else 2
    begun = min((chunks - 1) * turn + ways * behind + 1, chunks * times)
    rounds, left = divmod(begun, chunks * turn)
    return [rounds * turn + min(max(left - chunk * turn, 0), turn) for chunk in range(chunks)]
