"""Progress bar of a command, with its share and the time left; only on a terminal."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic  # noqa: TID251  (how often lines are printed)

from zsim.cli.notice import delegate, is_watched, silence

Callback = Callable[[float, float], object]
"""Callback for progress: takes the amount done and the total."""


NOTE_S = 10.0
"""Interval of lines about results so far, if standard error is no terminal."""

FIRST_NOTE_S = 2.0
"""Time before the first of them: answers that come sooner need none."""


class Lines:
    """Lines on standard error about the results so far; the amount of work is not printed."""

    def __init__(self) -> None:
        self._next_s = monotonic() + FIRST_NOTE_S

    def __call__(self, _done: float, _total: float) -> None:
        """Ignore the amount of work."""

    def note(self, text: Callable[[], str]) -> None:
        """Print a result so far, if it is time for another line."""
        if is_watched() and monotonic() >= self._next_s:
            self._next_s = monotonic() + NOTE_S
            print(f"zsim: {text()}", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, *, unit: str = "") -> Generator[Lines]:
    """Show the progress of `what` on standard error, with a bar if that is a terminal.

    A spinner runs until the first call of the yielded callback; then a bar replaces it. With a
    `unit`, the bar shows counts and a rate.
    """
    if not sys.stderr.isatty():
        delegate()
        yield Lines()
        return
    silence()
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):
        """Column with the rate in units per second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g} {unit}/s")

    done = (MofNCompleteColumn(), Speed()) if unit else (TaskProgressColumn(),)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), *done)
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(what, total=None)

        class NotedBar(Lines):
            """The bar; a result so far is its description."""

            def __init__(self) -> None:
                super().__init__()
                self._begun = False

            def __call__(self, done: float, total: float) -> None:
                """Show the amount of work; earlier results do not count towards the rate."""
                if not self._begun:
                    bar.reset(task, total=total, completed=int(done))
                    self._begun = True
                bar.update(task, total=total, completed=done)

            def note(self, text: Callable[[], str]) -> None:
                """Show a result so far."""
                bar.update(task, description=text())

        yield NotedBar()
