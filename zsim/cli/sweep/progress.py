"""A bar with rate and remaining time while runs go on; nothing where no one looks."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Told = Callable[[int, int], object]
"""Told how many runs are done, and of how many."""


@contextmanager
def progress() -> Generator[Told]:
    """Show a bar of the runs that are done, on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskID,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """Runs a second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g} runs/s")

    columns = (BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: list[TaskID] = []

        def told(done: int, total: int) -> None:
            if not tasks:  # what was kept before does not count as done at once
                tasks.append(bar.add_task("", total=total, completed=done))
            bar.update(tasks[0], completed=done)

        yield told
