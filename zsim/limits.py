"""The budget of a command: what it may read, compute and take, decided before it works.

One value holds for all that runs below `using`: every command, every call from Python, every run of
a study. `zsim.limited` and `zsim --limit` set it, and enforce memory and time.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Final

MIB: Final = 2**20

SCHEDULE_BYTES: Final = 4_000
"""Memory for an operation of a schedule that is made and proved: 2.9 kB of Llama 2 7B with 600
layers, 3.5 kB with recomputation."""

TRACE_BYTES: Final = 1_000
"""Memory for an operation that is simulated in one step: 0.4 to 1 kB."""

VISIT_OPERATIONS: Final = 40
"""Operations that a layer has for a micro-batch in ZeRO-3: 42 of Llama 2 7B."""

VISITS_MAX: Final = 100_000
"""Layers times micro-batches of a step: a slip of an exponent is told."""

RUN_BYTES: Final = 20_000
"""Memory for a run of a study before it is run: its scenario, settled."""


class TimeLimitError(RuntimeError):
    """What was asked takes longer than the limit on time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what a command does.

    Attributes:
        operations: simulated operations of a run, over all steps and ranks that are told apart.
        ranks: ranks of a cluster, told apart or not.
        runs: combinations of a study.
        file_bytes: size of a schedule, a trace or a table that is read.
        config_bytes: size of a scenario, a study or the description of a cluster.
        config_values: values that such a file has, in all its tables and lists.
        config_depth: tables and lists in each other.
        memory_bytes: memory of the process; None for what the machine has.
        time_s: how long a command may take, in seconds; None for as long as it takes.
        run_memory_bytes: memory of a worker that runs a study; None for its share of the machine's.
        run_time_s: how long a run of a study may take, in seconds.
    """

    operations: int = 2_000_000
    ranks: int = 1_000_000
    runs: int = 1_000_000
    file_bytes: int = 256 * MIB
    config_bytes: int = 4 * MIB
    config_values: int = 100_000
    config_depth: int = 100
    memory_bytes: int | None = None
    time_s: float | None = None
    run_memory_bytes: int | None = None
    run_time_s: float = 3600.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not value > 0:
                raise ValueError(f"limit {each.name}: {value} must be more than 0")

    def at_most(self, count: int, every_bytes: int) -> int:
        """Return `count`, or as many as the memory holds of what takes `every_bytes`."""
        if self.memory_bytes is None:
            return count
        return min(count, self.memory_bytes // every_bytes)

    @property
    def simulated_operations(self) -> int:
        """Operations of a run that the memory holds."""
        return self.at_most(self.operations, TRACE_BYTES)

    @property
    def visits(self) -> int:
        """Layers times micro-batches of a step whose schedule the memory holds."""
        return self.at_most(VISITS_MAX, VISIT_OPERATIONS * SCHEDULE_BYTES)

    @property
    def combinations(self) -> int:
        """Runs of a study that the memory holds."""
        return self.at_most(self.runs, RUN_BYTES)


USUAL: Final = Limits()
"""The limits where nobody asks for others."""

_CURRENT: ContextVar[Limits] = ContextVar("limits", default=USUAL)


def limits() -> Limits:
    """Return the limits that hold here."""
    return _CURRENT.get()


_STOP: ContextVar[Callable[[], None] | None] = ContextVar("stop", default=None)


def go_on() -> None:
    """Raise the caller's exception that stops long work, unless the work may continue."""
    stop = _STOP.get()
    if stop is not None:
        stop()


@contextmanager
def stopped_by(stop: Callable[[], None]) -> Generator[None]:
    """Let long work inside call `stop` now and then, which may raise."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


@contextmanager
def using(chosen: Limits) -> Generator[Limits]:
    """Let `chosen` hold inside."""
    token = _CURRENT.set(chosen)
    try:
        yield chosen
    finally:
        _CURRENT.reset(token)
