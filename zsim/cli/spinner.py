"""Something that moves while a command works."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def spinner(what: str) -> Generator[None]:
    """Show that `what` goes on, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(what)):
        yield
