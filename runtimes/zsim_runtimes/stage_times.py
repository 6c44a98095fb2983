"""Least time in which the stages of a pipeline run all their tasks and exchange their messages.

It follows from the actions that schedules are written from. Tasks of a stage run in sequence. A
message starts when both stages have issued it. Messages on a separate stream also wait for earlier
messages of either stage. Compute waits where the actions contain a wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zsim.strategy.strategy import Strategy
from zsim_runtimes.stage_actions import Awaited, Direction, Messages, StagePlace, Task

ENDS = 2
"""Stages of a message: its sender and its receiver."""

StageSeconds = Callable[[int, int, bool], float]
"""Return the seconds of a task, or of the message with its result: by the stage, the chunk, and
whether it is a forward."""

Pace = Callable[[Strategy, int, StageSeconds, StageSeconds], float]
"""Return a lower bound of the seconds of a pipeline, from the chunks of a stage and the least
seconds of tasks and of messages. It holds for all knobs that a search varies."""

Issued = Callable[[int, Sequence[tuple[Task, bool]]], Sequence[tuple[Task, bool]]]
"""Return messages, each with whether it is sent, in the order in which a stage issues them."""


def least_s(
    places: Sequence[StagePlace],
    orders: Sequence[Sequence[object]],
    tasks: StageSeconds,
    messages: StageSeconds,
    *,
    issued: Issued | None = None,
) -> float:
    """Return the seconds after which all stages have run their actions, at least.

    Args:
        places: the stages.
        orders: the actions of each stage; other actions than tasks, messages and waits take no
            time.
        tasks: seconds of tasks.
        messages: seconds of messages, by the task whose result they contain.
        issued: order of messages on a separate stream; None if they are on the compute stream.
    """
    known: dict[tuple[int, Task], _Message] = {}
    stages = [
        _StageRun(place, deque(order), known, tasks, messages, issued)
        for place, order in zip(places, orders, strict=True)
    ]
    while any([stage.advances() for stage in stages]):  # noqa: C419 (each stage advances)
        pass
    assert not any(stage.left for stage in stages), "a stage waits for a message never issued"
    return max(stage.compute_s for stage in stages)


@dataclass(slots=True)
class _Message:
    """A message: its seconds, the times at which its stages are ready for it, and its end."""

    seconds: float
    ready_s: dict[int, float] = field(default_factory=dict[int, float])
    end_s: float | None = None


@dataclass(slots=True)
class _StageRun:
    """A stage that runs its actions: the times at which its streams are free, and its waits."""

    place: StagePlace
    left: deque[object]
    known: dict[tuple[int, Task], _Message]
    tasks: StageSeconds
    messages: StageSeconds
    issued: Issued | None
    compute_s: float = 0.0
    stream_s: float = 0.0
    queue: deque[tuple[_Message, float]] = field(default_factory=deque[tuple[_Message, float]])
    awaited: list[_Message] = field(default_factory=list[_Message])

    def advances(self) -> bool:
        """Run actions and messages until the stage waits for another; return False if none ran."""
        ran = False
        while self._moves() or self._acts():
            ran = True
        return ran

    def _moves(self) -> bool:
        """Pass the messages that have started on the stream of messages; return True if any."""
        count = len(self.queue)
        while self.queue:
            message, issued_s = self.queue[0]
            self._join(message, max(issued_s, self.stream_s))
            if message.end_s is None:
                break
            self.stream_s = message.end_s
            self.queue.popleft()
        return len(self.queue) < count

    def _acts(self) -> bool:
        """Run the next action; return False if there is none, or if compute must wait."""
        for message in self.awaited:
            if message.end_s is None:
                return False
            self.compute_s = max(self.compute_s, message.end_s)
        self.awaited.clear()
        if not self.left:
            return False
        match self.left.popleft():
            case Task(direction=direction, chunk=chunk):
                is_forward = direction is Direction.FORWARD
                self.compute_s += self.tasks(self.place.index, chunk, is_forward)
            case Messages() as action:
                self._issue(action)
            case Awaited(task=task, is_sent=is_sent):
                self.awaited.append(self._message(task, is_sent=is_sent))
            case _:
                pass
        return True

    def _issue(self, action: Messages) -> None:
        messages = [(task, True) for task in action.sends]
        messages += [(task, False) for task in action.receives]
        if self.issued is not None:
            messages = [*self.issued(self.place.index, messages)]
        for task, is_sent in messages:
            message = self._message(task, is_sent=is_sent)
            if self.issued is None:
                self._join(message, self.compute_s)
            else:
                self.queue.append((message, self.compute_s))
            if action.is_awaited:
                self.awaited.append(message)

    def _join(self, message: _Message, ready_s: float) -> None:
        """Be ready for a message; it ends after the time it takes, once both stages are."""
        message.ready_s.setdefault(self.place.index, ready_s)
        if len(message.ready_s) == ENDS and message.end_s is None:
            message.end_s = max(message.ready_s.values()) + message.seconds

    def _message(self, task: Task, *, is_sent: bool) -> _Message:
        """Return the message with the result of a task, or with its input."""
        other, chunk = self.place.other_end(task, is_sent=is_sent)
        theirs = Task(task.direction, chunk, task.micro_batch)
        index, made = (self.place.index, task) if is_sent else (other, theirs)
        if (index, made) not in self.known:
            is_forward = made.direction is Direction.FORWARD
            self.known[index, made] = _Message(self.messages(index, made.chunk, is_forward))
        return self.known[index, made]
