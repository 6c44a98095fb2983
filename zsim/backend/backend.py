"""The protocol of a backend, and the registry of installed backends.

A backend is registered as an entry point of the group "zsim.backends": its name, and its class.
`zsim.conformance` tests that a backend fulfils the protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, cast, runtime_checkable

from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import Fault, Neighbour
from zsim.entry_point import entries, load
from zsim.memory.host_setup import HostSetup
from zsim.model.model import Model
from zsim.network.link_load import Decision
from zsim.schedule.schedule import Schedule
from zsim.suggestion import one_of
from zsim.trace.trace import LastStep, PeriodicStep, Trace

if TYPE_CHECKING:
    from zsim.schedule.bind import ExcessRows
    from zsim.schedule.binding import AnyBinding

GROUP = "zsim.backends"
SIMULATOR = "sim"
"""Name of the default backend."""


class BackendError(ValueError):
    """A backend cannot be loaded, or a job is invalid."""


class UnknownBackendError(BackendError, LookupError):
    """No backend of that name is registered."""


class BackendUnavailableError(BackendError):
    """The backend is registered, but a package that it needs is not installed."""


class RefusedError(BackendError):
    """The backend cannot execute this job; the message names the field or operation."""


class RunFailedError(RuntimeError):
    """The run itself failed: a rank died, or there was no progress for too long."""


class UnsteadyError(RuntimeError):
    """No part of a step repeats for further micro-batches; the message says why."""


class NoRouteError(RuntimeError):
    """No network path connects two ranks that communicate; the message names the failed links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A schedule to run for `steps` steps, its model and its cluster.

    `setup` is how the model is built before the first step. A schedule with named counts is `named`
    and has been bound by `binding`; `excess` is the first allocation with more rows than declared.
    """

    schedule: Schedule
    model: Model
    cluster: Cluster
    steps: int = 1
    setup: HostSetup = HostSetup.SHARDED
    named: Schedule | None = None
    binding: "AnyBinding | None" = None
    excess: "ExcessRows | None" = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BackendError(f"steps: {self.steps} must be at least 1")

    @property
    def written(self) -> Schedule:
        """The schedule with its named counts, which is proved and written to files."""
        return self.named or self.schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """Properties of a backend that callers depend on.

    Attributes:
        is_real: it trains on this machine, or on the ranks that torchrun started. So it computes
            values, and ignores the cluster of a scenario.
        predicts: times and memory of its traces are predictions for the cluster of the job.
        options: keyword arguments of its constructor: options of `zsim.run`; `faults`,
            `neighbours` and `decision` of a scenario; and `progress`, a callback.
    """

    is_real: bool = False
    predicts: bool = False
    options: frozenset[str] = frozenset()


class Backend(Protocol):
    """Runs a job and returns its trace. All arguments of the constructor are optional."""

    name: str
    traits: BackendTraits

    def refusal(self, job: Job) -> str | None:
        """Return the reason why this backend cannot execute `job`, in one line, or None."""
        ...

    def run(self, job: Job, *, seed: int) -> Trace:
        """Execute setup and all steps.

        Raises:
            RefusedError: `refusal` returned a reason; nothing was started.
            RunFailedError: the run started and did not finish.
        """
        ...


class ReusableBackend(Backend, Protocol):
    """A backend that simulates one schedule repeatedly, on any cluster and with any faults."""

    def under(
        self,
        *,
        faults: Sequence[Fault] = (),
        neighbours: Sequence[Neighbour] = (),
        decision: Decision | None = None,
    ) -> Self:
        """Return this backend with other faults, neighbours and decision, sharing its caches."""
        ...

    def last_step(self, job: Job, *, seed: int) -> LastStep:
        """Return the times of the last step, as in the trace of `run`, without the whole trace.

        Raises:
            RefusedError, NoRouteError, RunFailedError: as in `run`.
        """
        ...


@runtime_checkable
class PeriodicBackend(Protocol):
    """A backend that finds the period of a pipeline in the simulation of a few micro-batches."""

    def run_periodic(
        self, job: Job, *, seed: int, micro_batches: int, turn: int
    ) -> tuple[Trace, PeriodicStep]:
        """Return the trace of `run`, and the period of the last step: `turn` micro-batches.

        Raises:
            UnsteadyError: a step of this many micro-batches shows no period.
            RefusedError, NoRouteError, RunFailedError: as in `run`.
        """
        ...

    def periodic_step(
        self, job: Job, *, seed: int, micro_batches: int, turn: int, waits: bool = True
    ) -> PeriodicStep:
        """Return the period alone; without `waits`, hosts do not check their memory.

        Raises:
            UnsteadyError, RefusedError, NoRouteError, RunFailedError: as in `run_periodic`.
        """
        ...


def names() -> tuple[str, ...]:
    """Return the names of all registered backends, sorted."""
    return tuple(sorted({entry.name for entry in entries(GROUP)}))


def load_backend(name: str) -> type[Backend]:
    """Return the backend class registered under `name`, without importing other backends.

    Raises:
        UnknownBackendError: `name` is not registered.
        BackendUnavailableError: a package the backend needs is not installed.
        BackendError: two backends are registered as `name`, or its class has no `BackendTraits`.
        EntryPointError: its entry point names nothing.
    """
    found = [entry for entry in entries(GROUP) if entry.name == name]
    if not found:
        raise UnknownBackendError(f"backend: {one_of(name, names())}")
    if len(found) > 1:
        owners = ", ".join(entry.value for entry in found)
        raise BackendError(f"backend {name!r} is registered more than once: {owners}")
    try:
        kind = load(found[0])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("zsim"):
            raise
        hint = f"backend {name!r} needs {error.name}: pip install 'zsim[{name}]'"
        raise BackendUnavailableError(hint) from error
    if not isinstance(getattr(kind, "traits", None), BackendTraits):
        raise BackendError(f"backend {name!r}: its class attribute traits must be a BackendTraits")
    return cast("type[Backend]", kind)


def simulator() -> ReusableBackend:
    """Return an instance of the default simulator."""
    return cast("ReusableBackend", load_backend(SIMULATOR)())


def predicts(name: str) -> bool:
    """Return True if the times of the backend's traces are predictions; False if not installed."""
    try:
        return load_backend(name).traits.predicts
    except (UnknownBackendError, BackendUnavailableError):
        return False
