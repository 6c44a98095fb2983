"""Time that stages of a pipeline need for a micro-batch when they wait for no other stage."""

from zsim.schedule.operation import Communication, Together
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import RankTrace, Trace
from zsim.units import PICOSECONDS_PER_SECOND

MESSAGES = "pipeline"
"""Group of what stages send each other."""


def busiest_turn_s(schedule: Schedule, trace: Trace, micro_batch: int) -> float:
    """Return the seconds that the busiest stage takes for a micro-batch, its messages left out.

    No step of many micro-batches takes less for each. A task goes from the first of its operations
    to the last, with what its host and its tensor ranks keep it waiting for.
    """
    most = max(
        _turn_ps(schedule.program_of(rank.rank), rank, trace.steps - 1, micro_batch)
        for rank in trace.ranks
    )
    return most / PICOSECONDS_PER_SECOND


def _turn_ps(program: Program, rank: RankTrace, step: int, micro_batch: int) -> int:
    """Return the picoseconds of a rank in all tasks of a micro-batch."""
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
