"""Speeds of a rank, and its sequential work, for lower bounds of the step time."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf

from zsim.model.kernel import Kernel
from zsim.model.model import Model

ALONE_IN_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Laps of a ring for each collective: the number of times all but a share is sent."""

SWITCHED = frozenset({"all_reduce"})
"""Collectives that a switch can carry out, so that GPUs send the tensor once, not twice."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of an operation's kernels alone; in `moving_s` of them they only move memory."""

    seconds: float
    moving_s: float


KernelTimes = Callable[[tuple[Kernel, ...]], KernelTime]

TensorSeconds = Callable[[str, int, int], float]
"""Return the seconds of a collective of the tensor axis that has the links alone.
Arguments: its name, the bytes of the whole tensor, the ranks."""


def tensor_s(collective: str, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """Return a lower bound of the seconds of a collective within a domain with such links.

    It holds for a ring, and for a switch that reduces in the network.
    """
    laps = ALONE_IN_RING[collective]
    passed = laps * (ranks - 1) / ranks
    if collective in SWITCHED:
        passed = min(passed, 1 + 1 / ranks)
    return size_bytes * passed / bytes_per_s


@dataclass(slots=True)
class RankWork:
    """A rank's sequential work: kernels with their counts, and collectives of the tensor axis.

    `fused_s` are seconds that collectives fused with kernels add: by copies of a rank's own tokens,
    and because they take processors from these kernels.
    """

    kernels: Counter[KernelTime] = field(default_factory=Counter[KernelTime])
    tensor_s: float = 0.0
    fused_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Total time without overlap."""
        kernels_s = sum(each.seconds * count for each, count in self.kernels.items())
        return self.tensor_s + self.fused_s + kernels_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeeds:
    """Speeds of a rank, and the work of models that was computed with them.

    Attributes:
        kernels: times of the kernels of an operation.
        tensor: times of collectives of the tensor axis.
        copied_bytes_per_s: bytes that a copy on the device reads and writes per second.
        collective_share: fraction of a GPU that a collective uses while kernels compute.
        link_bytes_per_s: bandwidth of a GPU to the switch of its domain; infinite if not known.
    """

    kernels: KernelTimes
    tensor: TensorSeconds
    copied_bytes_per_s: float
    collective_share: float = 0.0
    link_bytes_per_s: float = inf
    works: dict[Hashable, tuple[Model, RankWork]] = field(
        default_factory=dict[Hashable, tuple[Model, RankWork]], repr=False, compare=False
    )
