"""A bar with rate and remaining time while runs go on; nothing where no one looks."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""Told how many more runs are done."""


@contextmanager
def progress(total: int, done: int) -> Generator[Advance]:
    """A bar of `total` runs of which some are done, on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
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
        task = bar.add_task("", total=total, completed=done)
        yield lambda count: bar.update(task, advance=count)
