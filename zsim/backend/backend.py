"""The protocol of a backend, and the registry of those that are installed.

A backend is registered as an entry point of the group "zsim.backends": its name, and its class.
`zsim.conformance` tests what every backend owes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, cast

from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import Fault, Neighbour
from zsim.entry_point import entries, load
from zsim.memory.host_setup import HostSetup
from zsim.model.model import Model
from zsim.network.link_load import Decision
from zsim.schedule.schedule import Schedule
from zsim.suggestion import one_of
from zsim.trace.trace import LastStep, Trace

if TYPE_CHECKING:
    pass

GROUP = "zsim.backends"
SIMULATOR = "sim"
"""The backend that is taken where nobody names one."""


class BackendError(ValueError):
    """A backend or job that cannot be had."""


class UnknownBackendError(BackendError, LookupError):
    """No backend of that name is registered."""


class BackendUnavailableError(BackendError):
    """The backend is registered, but a package that it needs is not installed."""


class RefusedError(BackendError):
    """The backend cannot execute this job; the message says which field or operation is why."""


class RunFailedError(RuntimeError):
    """The run itself failed: a rank died, or nothing moved for too long."""


class NoWayError(RuntimeError):
    """Ranks that have to exchange bytes cannot: the answer is no, and the message names the cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A schedule to run for `steps` steps, with the model it trains and the cluster it has.

    `setup` is how the model is built before the first step.
    """

    schedule: Schedule
    model: Model
    cluster: Cluster
    steps: int = 1
    setup: HostSetup = HostSetup.SHARDED

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BackendError(f"steps: {self.steps} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """Traits of a backend that its users go by.

    Attributes:
        is_real: it trains on ranks of this machine, or those that torchrun started. So it computes
            values, and the cluster of a scenario says nothing of it.
        predicts: times and memory of its traces are predictions for the cluster of the job.
        options: settings that its constructor takes, by name: those of `zsim.run`, faults,
            neighbours and decision of a scenario, and `progress`, which is told of steps.
    """

    is_real: bool = False
    predicts: bool = False
    options: frozenset[str] = frozenset()


class Backend(Protocol):
    """Runs a job and says what happened. Its own settings are its constructor's, all optional."""

    name: str
    traits: BackendTraits

    def refusal(self, job: Job) -> str | None:
        """Return one line that says why this backend cannot execute `job`, or None if it can."""
        ...

    def run(self, job: Job, *, seed: int) -> Trace:
        """Execute setup and all steps.

        Raises:
            RefusedError: `refusal` has something to say; nothing was started.
            RunFailedError: it began and could not end.
        """
        ...


class Trier(Backend, Protocol):
    """A backend that tries one schedule again and again, on any cluster, with any faults."""

    def under(
        self,
        *,
        faults: Sequence[Fault] = (),
        neighbours: Sequence[Neighbour] = (),
        decision: Decision | None = None,
    ) -> Self:
        """Return the same backend in other circumstances; what it knows of a schedule it keeps."""
        ...

    def last_step(self, job: Job, *, seed: int) -> LastStep:
        """Return the times that the trace of `run` has of its last step, without the rest of it.

        Raises:
            RefusedError, NoWayError, RunFailedError: as `run`.
        """
        ...


def names() -> tuple[str, ...]:
    """Return the names of all registered backends, sorted."""
    return tuple(sorted({entry.name for entry in entries(GROUP)}))


def load_backend(name: str) -> type[Backend]:
    """Return the backend class registered under `name`; imports nothing else.

    Raises:
        UnknownBackendError: `name` is not registered.
        BackendUnavailableError: a package the backend needs is not installed.
        BackendError: two are registered under it, or it does not say what it is.
        EntryPointError: its entry point names nothing.
    """
    found = tuple(entry for entry in entries(GROUP) if entry.name == name)
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
        raise BackendError(f"backend {name!r}: traits must be a BackendTraits, it has none")
    return cast("type[Backend]", kind)


def simulator() -> Trier:
    """Return the backend that predicts where nobody names one."""
    return cast("Trier", load_backend(SIMULATOR)())


def predicts(name: str) -> bool:
    """Return whether times in traces of a backend are predictions; False if it is not known."""
    try:
        return load_backend(name).traits.predicts
    except (UnknownBackendError, BackendUnavailableError):
        return False
