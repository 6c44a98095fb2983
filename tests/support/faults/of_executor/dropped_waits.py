"""FSDP2 with one of its waits left out."""

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from zsim_record.record.pretended_streams import PretendedEvent, PretendedStream

_WAITS = (
    (PretendedStream, "wait_event"),
    (PretendedStream, "wait_stream"),
    (PretendedEvent, "synchronize"),
)


class WaitSite(NamedTuple):
    """A line of FSDP2 that makes a stream or the host wait."""

    file: str
    function: str
    source: str
    """The line itself: it outlives a change above it."""


@contextmanager
def waits_seen(drop: Callable[[WaitSite], bool] = lambda _: False) -> Generator[set[WaitSite]]:
    """Collect the lines of FSDP2 that wait, and leave out the waits that `drop` says."""
    seen: set[WaitSite] = set()
    with ExitStack() as stack:
        for owner, name in _WAITS:
            stack.enter_context(
                patch.object(owner, name, _watched(getattr(owner, name), seen, drop))
            )
        yield seen


def _watched(
    wait: Callable[..., None], seen: set[WaitSite], drop: Callable[[WaitSite], bool]
) -> Callable[..., None]:
    lines: dict[str, list[str]] = {}

    def watched(*args: Any) -> None:
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        path = Path(frame.f_code.co_filename)
        if path.parent.name != "_fully_shard":
            wait(*args)
            return
        source = lines.setdefault(str(path), path.read_text("utf-8").splitlines())
        number = frame.f_lineno
        text = source[number - 1].strip()
        if text.endswith("("):  # the argument tells lines of one kind apart
            text += source[number].strip()
        site = WaitSite(path.name, frame.f_code.co_name, text)
        seen.add(site)
        if not drop(site):
            wait(*args)

    return watched
