"""Time that a pipeline stage needs for one micro-batch, without waits for other stages."""

from zsim.schedule.operation import Communication, Together
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import RankTrace, Trace
from zsim.units import PICOSECONDS_PER_SECOND

MESSAGES = "pipeline"
"""Group of the messages between stages."""


def busiest_stage_s(schedule: Schedule, trace: Trace, micro_batch: int) -> float:
    """Return the seconds that the busiest stage spends on a micro-batch, excluding messages.

    In a step of many micro-batches, this is a lower bound on the time of each. A task lasts from
    its first operation to its last, including its waits for the host and for tensor ranks.
    """
    most = max(
        _stage_ps(schedule.program_of(rank.rank), rank, trace.steps - 1, micro_batch)
        for rank in trace.ranks
    )
    return most / PICOSECONDS_PER_SECOND


def _stage_ps(program: Program, rank: RankTrace, step: int, micro_batch: int) -> int:
    """Return the picoseconds that a rank spends on all tasks of a micro-batch."""
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    own = f"mb{micro_batch}"
    for event in rank.events:
        if event.step != step or event.stream != COMPUTE:
            continue
        parts = event.operation.split("/")
        if len(parts) < 4 or parts[2] != own or _is_message(program, event.operation):
            continue
        task = parts[1], parts[3] if parts[3].startswith("chunk") else ""
        begin, end = spans.get(task, (event.start_ps, event.end_ps))
        spans[task] = min(begin, event.start_ps), max(end, event.end_ps)
    return sum(end - begin for begin, end in spans.values())


def _is_message(program: Program, operation: str) -> bool:
    found = program.by_id[operation]
    return isinstance(found, Communication | Together) and found.group == MESSAGES
