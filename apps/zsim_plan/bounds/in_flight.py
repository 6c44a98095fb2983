"""Micro-batches that a pipeline stage has in flight when its backwards start.

With one chunk they are one for each later stage, and its own (PipeDream-Flush, Narayanan et al.
2021, section 2.2.1). With several, each chunk runs as many micro-batches in turn as there are
stages, forward from the first chunk on, backward from the last. The first backward waits for all
turns of forward but the last, and for each later stage twice, there and back (section 2.2.2), or
once if gradients of weights fill the time back (ZB-1p, Qi et al. 2024, arXiv 2401.10241). In a V
both chunks together hold as many as two of each stage (ZB-V, ibid. section 6).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.model.pipeline_stages import Stage
from zsim.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardMoment:
    """The time at which a backward of a stage starts.

    Attributes:
        in_flight: of each chunk, micro-batches whose backward has not ended.
        has_gradients: whether every chunk has gradients of parameters, all of them unreduced.
    """

    in_flight: Sequence[int]
    has_gradients: bool


def moments(stage: Stage, strategy: Strategy) -> Iterator[BackwardMoment]:
    """Yield the start of the first backward of `stage`, then of the first with all gradients."""
    times, runtime = strategy.train.gradient_accumulation_steps, strategy.zero.emulate
    count, chunks = strategy.parallel.pipeline, len(stage.chunks)
    if runtime is not None and runtime.stages_in_v:
        yield from _in_v(count, stage.index, times)
        return
    splits = runtime is not None and runtime.splits_backward
    turn, behind = times // max(1, times // count), count - 1 - stage.index
    if chunks == 1:
        ahead, collected, turns = behind + 1, 1, _ChunkTurns(chunks=1, turn=times, times=times)
    else:
        ahead = (chunks - 1) * turn + (1 if splits else 2) * behind + 1
        collected = (chunks - 1) * turn + 1 + (stage.index if splits else 0)
        turns = _ChunkTurns(chunks=chunks, turn=turn, times=times)
    yield turns.moment(0, ahead=ahead)
    if times >= (2 if chunks == 1 else 2 * turn):  # else the last chunk has already reduced
        yield turns.moment(collected, ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkTurns:
    """Chunks of a stage; each runs `turn` of all `times` micro-batches before the next chunk."""

    chunks: int
    turn: int
    times: int

    def moment(self, done: int, *, ahead: int) -> BackwardMoment:
        """Return the moment after `done` backwards, with at most `ahead` more forwards."""
        forwards = self._of_chunks(min(ahead + done, self.chunks * self.times))
        backwards = self._of_chunks(done)[::-1]
        left = [begun - ended for begun, ended in zip(forwards, backwards, strict=True)]
        return BackwardMoment(in_flight=left, has_gradients=done > 0)

    def _of_chunks(self, tasks: int) -> list[int]:
        """Return the number of the first `tasks` tasks in each chunk, in order of their start."""
        rounds, left = divmod(tasks, self.chunks * self.turn)
        return [
            rounds * self.turn + min(max(left - chunk * self.turn, 0), self.turn)
            for chunk in range(self.chunks)
        ]


def _in_v(stages: int, index: int, times: int) -> Iterator[BackwardMoment]:
    first = 2 * stages - index - 1
    yield BackwardMoment(in_flight=(min(first, times), min(index + 1, times)), has_gradients=False)
    if times > first + 1:  # by then one round of all tasks has ended
        yield BackwardMoment(in_flight=(first + 1, index), has_gradients=True)
