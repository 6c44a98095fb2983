"""Progress of a command on a terminal: a bar with a share and the time left; elsewhere nothing."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Told = Callable[[float, float], object]
"""Told how much is done, and of how much."""


@contextmanager
def progress(what: str, *, unit: str = "") -> Generator[Told]:
    """Show that `what` goes on, on standard error if that is a terminal.

    Once something was told there is a bar; of things that are counted in a `unit`, with a rate.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
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
        """Rate of what is counted in a unit."""

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
            if not begun:  # what was kept before does not count as done at once
                bar.reset(task, total=total, completed=int(done))
                begun = True
            bar.update(task, total=total, completed=done)

        yield told
