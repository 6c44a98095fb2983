"""Limits of a command: sizes of its input, of its simulation and of its memory, and its time.

Inside `using`, the chosen limits apply to every command, call from Python and run of a study.
`zsim.limited` and `zsim --limit` set them, and enforce memory and time.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Final

MIB: Final = 2**20

SCHEDULE_BYTES: Final = 4_000
"""Memory to build and prove a schedule, for each operation. Measured: 2.9 kB for Llama 2 7B with
600 layers, 3.5 kB with recomputation."""

TRACE_BYTES: Final = 1_000
"""Memory to simulate an operation of one step. Measured: 0.4 to 1 kB."""

VISIT_OPERATIONS: Final = 40
"""Operations of a layer for a micro-batch in ZeRO-3; Llama 2 7B has 42."""

VISITS_MAX: Final = 100_000
"""Maximum of layers times micro-batches of a step, to catch a wrong exponent in a file."""

RUN_BYTES: Final = 20_000
"""Memory for each run of a study that has not started: its resolved scenario."""


class TimeLimitError(RuntimeError):
    """The work exceeded the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Maximum sizes, memory and time of a command.

    Attributes:
        operations: simulated operations of a run, over all steps and distinct ranks.
        ranks: ranks of a cluster, distinct or not.
        runs: combinations of a study.
        file_bytes: size of a schedule, trace or table to read.
        config_bytes: size of a scenario, a study or the description of a cluster.
        config_values: values in such a file, over all its tables and lists.
        config_depth: nesting depth of tables and lists.
        memory_bytes: memory of the process; None for the memory of the machine.
        time_s: time of a command, in seconds; None for no limit.
        run_memory_bytes: memory of a worker process of a study; None for an equal share of the
            machine's memory.
        run_time_s: time of a run of a study, in seconds.
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
        """Return `count`, or fewer if the memory limit holds fewer items of `every_bytes`."""
        if self.memory_bytes is None:
            return count
        return min(count, self.memory_bytes // every_bytes)

    @property
    def simulated_operations(self) -> int:
        """Maximum number of simulated operations within the memory limit."""
        return self.at_most(self.operations, TRACE_BYTES)

    @property
    def visits(self) -> int:
        """Maximum of layers times micro-batches of a step within the memory limit."""
        return self.at_most(VISITS_MAX, VISIT_OPERATIONS * SCHEDULE_BYTES)

    @property
    def combinations(self) -> int:
        """Maximum number of runs of a study within the memory limit."""
        return self.at_most(self.runs, RUN_BYTES)


USUAL: Final = Limits()
"""The default limits."""

_CURRENT: ContextVar[Limits] = ContextVar("limits", default=USUAL)


def limits() -> Limits:
    """Return the limits of the current context."""
    return _CURRENT.get()


_STOP: ContextVar[Callable[[], None] | None] = ContextVar("stop", default=None)


def go_on() -> None:
    """Raise the caller's exception that stops long work, unless the work may continue."""
    stop = _STOP.get()
    if stop is not None:
        stop()


@contextmanager
def stopped_by(stop: Callable[[], None]) -> Generator[None]:
    """Inside, let long work call `stop` from time to time; `stop` may raise to end the work."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


@contextmanager
def using(chosen: Limits) -> Generator[Limits]:
    """Set `chosen` as the current limits inside the context."""
    token = _CURRENT.set(chosen)
    try:
        yield chosen
    finally:
        _CURRENT.reset(token)
