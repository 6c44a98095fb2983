"""Failures of ranks, and which of several is the cause.

When one rank fails, the others soon fail because their peer is gone. The report starts with the
failure that no peer explains.
"""

import re
import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from tempfile import NamedTemporaryFile

from torch import distributed

from zsim.backend.backend import RunFailedError

_LINE_CHARACTERS_MAX = 300
_PEER = re.compile(
    r"gloo/|Connection (closed|reset|refused)|[Bb]roken pipe|socket|[Tt]imed out|NCCL", re.ASCII
)
"""Texts with which Gloo, NCCL and the stores report that a peer is gone or late."""


class Cause(IntEnum):
    """Kinds of failure, the most likely cause first."""

    DIED = 0
    RAISED = 1
    HUNG = 2
    LOST_ITS_PEER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's failure: one line, and the details that are written to a file."""

    rank: int
    cause: Cause
    message: str
    details: str = ""

    @property
    def line(self) -> str:
        """Return rank and message in one line."""
        return f"rank {self.rank}: {self.message}"


class RankFailedError(RunFailedError):
    """A rank raised, died or hung. `details` is the path of the full report."""

    def __init__(self, failure: Failure, report: Iterable[str]) -> None:
        with NamedTemporaryFile(
            "w", encoding="utf-8", prefix="zsim-failure-", suffix=".txt", delete=False
        ) as file:
            file.write("\n".join([failure.line, "", *report]))
        super().__init__(f"{failure.line} (details: {file.name})")
        self.rank = failure.rank
        self.cause = failure.cause
        self.details = file.name


def one_line(error: BaseException) -> str:
    """Return type and first line of `error`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _LINE_CHARACTERS_MAX else f"{text[:_LINE_CHARACTERS_MAX]}..."


def cause_of(error: BaseException) -> Cause:
    """Return RAISED for an error of the rank itself, LOST_ITS_PEER for the loss of a peer."""
    if isinstance(error, distributed.DistError):
        return Cause.LOST_ITS_PEER
    if isinstance(error, RuntimeError) and _PEER.search(str(error)):
        return Cause.LOST_ITS_PEER
    return Cause.RAISED


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return the failure of `rank` that `error` caused."""
    return Failure(
        rank=rank,
        cause=cause_of(error),
        message=one_line(error),
        details="".join(traceback.format_exception(error)),
    )


def death(rank: int, status: int | None, where: str) -> Failure:
    """Return the failure of a rank whose process ended with `status` (negative: a signal).

    `where` is the last line of its progress record.
    """
    if status is not None and status < 0:
        try:
            how = f"killed by {signal.Signals(-status).name}"
        except ValueError:
            how = f"killed by signal {-status}"
        if -status == signal.SIGKILL:
            how += " (out of memory, or by hand)"
    else:
        how = f"ended with status {status} before its work was done"
    return Failure(rank=rank, cause=Cause.DIED, message=f"{how}, last seen: {where}")


def origin(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others; among equals the first one."""
    return min(failures, key=lambda failure: failure.cause)
