"""Progress bar of a command, with its share and the time left; only on a terminal."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from zsim.cli.notice import delegate, silence

Told = Callable[[float, float], object]
"""Callback for progress: takes the amount done and the total."""


@contextmanager
def progress(what: str, *, unit: str = "") -> Generator[Told]:
    """Show the progress of `what` on standard error if that is a terminal.

    A spinner runs until the first call of the yielded callback; then a bar replaces it. With a
    `unit`, the bar shows counts and a rate.
    """
    if not sys.stderr.isatty():
        delegate()
        yield lambda _done, _total: None
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
        begun = False

        def told(done: float, total: float) -> None:
            nonlocal begun
            if not begun:  # earlier results do not count towards the rate
                bar.reset(task, total=total, completed=int(done))
                begun = True
            bar.update(task, total=total, completed=done)

        yield told
