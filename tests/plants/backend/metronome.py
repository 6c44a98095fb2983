"""A backend: everything takes a microsecond, one after the other, in the order of the host."""

from itertools import count

from zsim.backend.backend import BackendTraits, Job
from zsim.schedule.replace import replace
from zsim.trace.trace import RankTrace, Trace
from zsim_null import NullBackend

TICK_PS = 1_000_000


class Metronome:
    """Takes what the null backend records, and gives it times."""

    name = "metronome"
    traits = BackendTraits()

    def refusal(self, job: Job) -> str | None:
        """Return None: whatever can be recorded can be given times."""
        del job
        return None

    def run(self, job: Job, *, seed: int) -> Trace:
        """Run setup and all steps."""
        recorded = NullBackend().run(job, seed=seed)
        ranks = tuple(_timed(rank) for rank in recorded.ranks)
        ends = tuple(
            max(event.end_ps for rank in ranks for event in rank.events if event.step <= step)
            for step in range(job.steps)
        )
        error_text = "no times: the metronome has one tick for all"
        return replace(
            recorded, backend=self.name, ranks=ranks, step_end_ps=ends, error_text=error_text
        )


def _timed(rank: RankTrace) -> RankTrace:
    return replace(
        rank,
        events=tuple(
            replace(event, start_ps=tick * TICK_PS, end_ps=(tick + 1) * TICK_PS)
            for tick, event in zip(count(), rank.events, strict=False)
        ),
    )
