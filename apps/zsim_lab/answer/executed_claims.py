"""Small runs on real ranks that have the mechanisms of claims, compared with plain training.

Runs compute in fp64, because sums over four ranks have another order in each stage. Losses are
compared in fp32, in which such differences vanish and any other difference shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from struct import pack

from zsim.api.launch import run
from zsim.api.scenario import load
from zsim.mistake import MistakeError

SCENARIO, RANKS, BACKEND = "tiny", 4, "torch"

EXACT = "train.precision=fp64"
"""Setting of every run: rounding of sums is far below the last bit of a loss in fp32."""

REFERENCE = "stage 0"
"""Plain data parallelism on the same ranks, the reference of every other run."""

MECHANISMS: Mapping[str, tuple[str, ...]] = {
    REFERENCE: ("zero.stage=0",),
    "stage 1": ("zero.stage=1",),
    "stage 2": ("zero.stage=2",),
    "stage 3": ("zero.stage=3",),
    "checkpoints in host memory": (
        "zero.stage=2",
        "zero.contiguous=true",
        "activations.checkpointing=full",
        "offload.checkpoints=host",
    ),
    "optimizer in host memory": ("zero.stage=2", "offload.optimizer=host"),
    "delayed update": ("zero.stage=2", "offload.optimizer=host", "offload.delayed_update=true"),
    "parameters and optimizer in files": (
        "zero.stage=3",
        "offload.optimizer=nvme",
        "offload.parameters=nvme",
    ),
    "4 tiles": ("zero.stage=3", "zero.tiles=4"),
    "prefetching": ("zero.stage=3", "zero.prefetch_units=2"),
}
"""Settings of each small run, by the name that claims use."""

DELAYED = "delayed update"
"""Its second step computes with the initial parameters, as a run without updates does."""

UNCHANGED: tuple[tuple[str, ...], int] = (("zero.stage=0", "train.learning_rate=0"), 2)
"""Settings of training without updates, and the first steps whose losses a delayed update has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A small run on real ranks.

    Attributes:
        steps: number of optimizer steps.
        apart: largest relative difference of a loss from plain training, 0 if all are equal in
            fp32; None if the run failed.
        why_not: the reason why the run failed or could not start.
        is_reference: True for the run that all others are compared with.
    """

    steps: int = 0
    apart: float | None = None
    why_not: str = ""
    is_reference: bool = False

    @property
    def word(self) -> str:
        """Text of a cell: equal bits, or the largest difference."""
        if self.apart is None or self.is_reference:
            return self.why_not or "reference"
        return "equal bits" if self.apart == 0 else f"{self.apart:.0e} apart"


def execute(names: frozenset[str]) -> dict[str, Executed]:
    """Run the mechanisms `names` on local ranks, each once, and compare their losses.

    Raises:
        KeyError: a mechanism is unknown.
    """
    unknown = names - {*MECHANISMS}
    if unknown:
        raise KeyError(f"{min(unknown)}: is no mechanism of MECHANISMS")
    if not names:
        return {}
    plain = _losses(MECHANISMS[REFERENCE])
    return {name: _compared(name, plain) for name in MECHANISMS if name in names}


def _losses(settings: tuple[str, ...]) -> tuple[float, ...] | str:
    """Return the losses of a run, or the reason why there are none."""
    try:
        found = run(load(SCENARIO, (*settings, EXACT), ranks=RANKS), backend=BACKEND)
    except MistakeError as error:
        return str(error)
    return found.losses


def _compared(name: str, plain: tuple[float, ...] | str) -> Executed:
    """Compare a mechanism with plain training."""
    own = plain if name == REFERENCE else _losses(MECHANISMS[name])
    if name == DELAYED:
        plain = _losses(UNCHANGED[0])
    if isinstance(own, str):
        return Executed(why_not=own)
    if isinstance(plain, str):
        return Executed(why_not=plain)
    if name == DELAYED:
        own, plain = own[: UNCHANGED[1]], plain[: UNCHANGED[1]]
    pairs = list(zip(own, plain, strict=True))
    apart = max(
        (abs(one - other) / other for one, other in pairs if not _same(one, other)), default=0
    )
    return Executed(steps=len(own), apart=apart, is_reference=name == REFERENCE)


def _same(one: float, other: float) -> bool:
    """Return True if two losses have the same bits in fp32."""
    return pack("f", one) == pack("f", other)
