"""Orders of the stages of a pipeline beside each other, and a schedule that misses one wait."""

from collections.abc import Sequence

from zsim.schedule.operation import Compute, Receive
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim_runtimes.stage_actions import Direction, Messages

Sent = list[tuple[int, int]]
"""Messages in order, each by the virtual stage that makes it and its micro-batch."""


def sent_and_taken(orders: Sequence[Sequence[object]], way: Direction) -> list[tuple[Sent, Sent]]:
    """By stage what it sends one way, and what its neighbor there takes."""
    count = len(orders)

    def messages(stage: int, *, sends: bool) -> Sent:
        return [
            (task.chunk * count + stage - (0 if sends else way), task.micro_batch)
            for action in orders[stage]
            if isinstance(action, Messages)
            for task in (action.sends if sends else action.receives)
            if task.direction is way
        ]

    return [
        (messages(stage, sends=True), messages((stage + way) % count, sends=False))
        for stage in range(count)
    ]


def without_first_wait(made: Schedule, stage: int) -> Schedule:
    """The schedule with the first kernel of a stage that waits for messages not waiting for any."""
    program = made.programs[stage]
    received = {each.id for each in program.step if isinstance(each, Receive)}
    place, reader = next(
        (place, each)
        for place, each in enumerate(program.step)
        if isinstance(each, Compute) and received & set(each.after)
    )
    after = tuple(edge for edge in reader.after if edge not in received)
    step = (*program.step[:place], replace(reader, after=after), *program.step[place + 1 :])
    programs = list(made.programs)
    programs[stage] = replace(program, step=step)
    return replace(made, programs=tuple(programs))
