"""Goodput of a training: its failures, checkpoints, restarts and spare nodes, with sources."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf, isfinite, isinf
from typing import Final, TypeVar

from zsim.analysis.goodput import Interruptions, chance_of_enough, least_spares, share_down
from zsim.mistake import MistakeError
from zsim.strategy.strategy import Strategy
from zsim.suggestion import one_of
from zsim.units import UnitError, format_bytes, parse_bandwidth, parse_duration

SECONDS_PER_HOUR, SECONDS_PER_DAY, SECONDS_PER_YEAR = 3600, 86_400, 31_557_600

FAILURES: Final = 419 / (54 * 24 * 16_384)
"""Default failures per GPU and hour: 419 unexpected interruptions in 54 days on 16,384 H100.

"The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.4 and table 5.
"""
FAILURES_SOURCE: Final = "Llama 3, arXiv 2407.21783: 419 in 54 days on 16,384 H100"

STORAGE: Final = 2e12 / 16_384
"""Default bytes per second and GPU of a checkpoint: 2 TB/s of storage for 16,384 GPUs.

"The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.1: the sustained rate.
"""
STORAGE_SOURCE: Final = "Llama 3: 2 TB/s for 16,384 GPUs"

DETECTION_S: Final = 600
"""Default seconds from a failure until the job starts again and reads its checkpoint.

"MegaScale" (arXiv 2402.15627), section 6.3: detection and diagnosis take less than 10 minutes.
"""
DETECTION_SOURCE: Final = "MegaScale, arXiv 2402.15627: detection in at most 10 min"

ENOUGH: Final = 0.99
"""Default share of time for which enough nodes must work."""

SIMULATIONS: Final = 200
"""Number of simulated trainings."""

DRAWS_MAX: Final = 1_000_000
"""Maximum number of failures in all simulated trainings; with more, their spread is small."""

LEAST: Final = 0.01
"""Goodput below which the answer is that the training does not end."""

NAMES: Final = (
    *("failures", "checkpoint", "storage", "restart", "interval"),
    *("repair", "spares", "goodput"),
)
"""Keys of --reliability."""

Given = Mapping[str, object] | Sequence[str] | None
"""Values by key, or texts such as "restart=10min"."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Failures of GPUs, and how a training recovers; None means a default.

    Attributes:
        failures: failures per GPU and hour.
        checkpoint_s: seconds for which steps wait for a checkpoint.
        storage: bytes per second with which all GPUs together write and read a checkpoint.
        restart_s: seconds from a failure until steps run again.
        interval_s: seconds of steps between checkpoints.
        repair_s: seconds until a node that failed works again; None: a spare node is always ready.
        spares: number of spare nodes.
        goodput: goodput to reach with spare nodes.
    """

    failures: float | None = None
    checkpoint_s: float | None = None
    storage: float | None = None
    restart_s: float | None = None
    interval_s: float | None = None
    repair_s: float | None = None
    spares: int | None = None
    goodput: float | None = None


def reliability_of(given: Given) -> FailureModel:
    """Return the reliability that `--reliability` gives.

    Raises:
        MistakeError: a key is unknown, or a value is wrong or contradicts another.
    """
    pairs = given.items() if isinstance(given, Mapping) else map(_pair, given or ())
    known: dict[str, str] = {}
    for name, value in pairs:
        if name not in NAMES:
            raise MistakeError(f"--reliability: {one_of(name, NAMES)}")
        if name in known:
            raise MistakeError(f"--reliability: {name}: given twice; remove one")
        known[name] = str(value)
    both = {"checkpoint", "storage"} & known.keys()
    if len(both) == 2 and "restart" in known:
        raise MistakeError("--reliability: storage: unused with checkpoint and restart; remove it")
    for name in ("spares", "goodput"):
        if name in known and "repair" not in known:
            raise MistakeError(
                f"--reliability: {name}: needs repair=TIME, after which a failed node works again"
            )
    if "spares" in known and "goodput" in known:
        raise MistakeError("--reliability: goodput: finds the number of spares; remove spares")
    return FailureModel(
        failures=_read(known, "failures", _rate),
        checkpoint_s=_read(known, "checkpoint", _seconds),
        storage=_read(known, "storage", parse_bandwidth),
        restart_s=_read(known, "restart", _seconds),
        interval_s=_read(known, "interval", _seconds),
        repair_s=_read(known, "repair", _seconds),
        spares=_read(known, "spares", _count),
        goodput=_read(known, "goodput", _share),
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value:
        raise MistakeError(f"--reliability: {text!r} must be KEY=VALUE, such as failures=2e-5")
    return name, value


def _read(known: Mapping[str, str], name: str, parse: Callable[[str], _T]) -> _T | None:
    if name not in known:
        return None
    try:
        return parse(known[name])
    except UnitError as error:
        raise MistakeError(f"--reliability: {name}: {error}") from None


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if isfinite(found) else None


def _rate(text: str) -> float:
    found = _number(text)
    if found is None or not 0 <= found <= 1:
        raise UnitError(f"{text!r} must be failures per GPU and hour, from 0 to 1, such as 2e-5")
    return found


def _seconds(text: str) -> float:
    found = parse_duration(text)
    if found < 1:
        raise UnitError(f"{text!r} must be at least 1 s")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise UnitError(f"{text!r} must be a whole number of nodes, at most 999,999")
    return int(text)


def _share(text: str) -> float:
    number = _number(text.removesuffix("%"))
    found = None if number is None else number / (100 if text.endswith("%") else 1)
    if found is None or not 0 < found < 1:
        raise UnitError(f"{text!r} must be a share below 1, such as 95%")
    return found


def checkpoint_bytes(strategy: Strategy, trained: int) -> int:
    """Return the bytes of a checkpoint of `trained` parameters: weights and optimizer states."""
    precision, rule = strategy.train.precision, strategy.train.optimizer
    wide = len(rule.states) + precision.has_master
    return trained * (precision.compute.size_bytes + wide * precision.optimizer.size_bytes)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Goodput of a training on a number of GPUs.

    Attributes:
        gpus: number of GPUs that train.
        gpus_per_node: GPUs of a node, which fail together.
        bytes: bytes of a checkpoint.
        given: options of `--reliability`.
    """

    gpus: int
    gpus_per_node: int
    bytes: int
    given: FailureModel = field(default_factory=FailureModel)

    @property
    def failures(self) -> float:
        """Failures per GPU and hour."""
        return FAILURES if self.given.failures is None else self.given.failures

    @property
    def storage(self) -> float:
        """Bytes per second with which all GPUs together write and read a checkpoint."""
        return STORAGE * self.gpus if self.given.storage is None else self.given.storage

    @cached_property
    def interruptions(self) -> Interruptions:
        """Time between failures of the job, of a checkpoint, and of a restart."""
        copied_s = max(self.bytes, 1) / self.storage
        rate = self.failures * self.gpus / SECONDS_PER_HOUR
        given = self.given
        return Interruptions(
            between_s=1 / rate if rate else inf,
            checkpoint_s=copied_s if given.checkpoint_s is None else given.checkpoint_s,
            restart_s=DETECTION_S + copied_s if given.restart_s is None else given.restart_s,
        )

    @property
    def interval_s(self) -> float:
        """Seconds of steps between checkpoints: as asked, else the optimum."""
        asked = self.given.interval_s
        return self.interruptions.optimal_s if asked is None else asked

    @property
    def running(self) -> float:
        """Share of time that is progress while enough nodes work; 0 if it makes no progress."""
        return 1 / self.interruptions.stretch(self.interval_s)

    @property
    def nodes(self) -> int:
        """Number of nodes that train."""
        return ceil(self.gpus / self.gpus_per_node)

    @property
    def down(self) -> float:
        """Share of time for which a node is in repair."""
        per_node = self.failures * min(self.gpus_per_node, self.gpus) / SECONDS_PER_HOUR
        return share_down(per_node, self.given.repair_s or 0.0)

    @cached_property
    def spares(self) -> int | None:
        """Spare nodes: as asked, else the least that reach the target; None if none do."""
        if self.given.spares is not None:
            return self.given.spares
        target = ENOUGH if self.given.goodput is None else self.given.goodput / self.running
        if target >= 1:
            return None
        return least_spares(self.nodes, self.down, target, most=2 * self.nodes + 100)

    @property
    def spare_gpus(self) -> int:
        """GPUs of the spare nodes; 0 unless spare nodes are counted."""
        if self.given.repair_s is None or self.spares is None:
            return 0
        return self.spares * min(self.gpus_per_node, self.gpus)

    def enough(self, spares: int) -> float:
        """Return the share of time for which enough nodes work, with a number of spares."""
        return chance_of_enough(self.nodes, spares, self.down)

    @property
    def goodput(self) -> float:
        """Share of time that is progress, waits for nodes included."""
        if self.given.repair_s is None or self.spares is None:
            return self.running
        return self.running * self.enough(self.spares)

    def passing_s(self, work_s: float) -> float:
        """Return the expected time of a training whose steps alone take `work_s`.

        Raises:
            MistakeError: almost no time is progress, so the training does not end.
        """
        if self.goodput < LEAST:
            found = self.interruptions
            raise MistakeError(
                f"--reliability: a failure every {_time(found.between_s)} and a checkpoint of "
                f"{_time(found.checkpoint_s)}: less than {LEAST:.0%} of the time is progress, so "
                "the training does not end; use fewer failures or a shorter checkpoint"
            )
        return work_s / self.goodput

    def simulated_s(self, work_s: float) -> tuple[float, float] | None:
        """Return times that 5 % and 95 % of simulated trainings do not exceed.

        Waits for nodes are not simulated. None if there are no failures, or too many to simulate.
        """
        found, interval_s = self.interruptions, self.interval_s
        stretch = found.stretch(interval_s)
        if isinf(found.between_s) or isinf(stretch):
            return None
        if SIMULATIONS * work_s * stretch / found.between_s > DRAWS_MAX:
            return None
        from numpy.random import default_rng

        draws = [default_rng(seed) for seed in range(SIMULATIONS)]
        times = sorted(found.simulated_s(work_s, interval_s, each) for each in draws)
        return times[SIMULATIONS // 20], times[-1 - SIMULATIONS // 20]

    def facts(self, work_s: float | None = None) -> list[tuple[str, str]]:
        """Return the lines on goodput, checkpoints and spare nodes.

        Args:
            work_s: seconds of all steps alone; None if the tokens of the training are unknown.
        """
        if not self.failures and self.given.interval_s is None:
            return [("goodput", "100.0%: no failures (--reliability failures=0), no checkpoints")]
        return [
            ("goodput", self._goodput_text()),
            ("checkpoints", self._checkpoint_text()),
            *self._simulated(work_s),
            *self._spares(),
        ]

    def _goodput_text(self) -> str:
        found, given = self.interruptions, self.given
        source = "" if given.failures is not None else f"; {FAILURES_SOURCE}"
        rate = f"{self.failures:.2g}".replace("e-0", "e-") + f" per GPU and hour{source}"
        again = _time(found.restart_s)
        if given.restart_s is None:
            again += f" ({DETECTION_SOURCE}, then a read)"
        often = (
            "no failure" if isinf(found.between_s) else f"a failure every {_time(found.between_s)}"
        )
        return f"{self.goodput:.1%}: {often} ({rate}), a restart in {again}"

    def _checkpoint_text(self) -> str:
        found, given = self.interruptions, self.given
        text = f"{_time(found.checkpoint_s)} each"
        if given.checkpoint_s is None:
            source = "" if given.storage is not None else f" ({STORAGE_SOURCE})"
            text += (
                f" for {format_bytes(self.bytes)} at {format_bytes(round(self.storage))}/s{source}"
            )
        best = f"Young {_time(found.young_s)}, Daly {_time(found.daly_s)}"
        if given.interval_s is None:
            return f"every {_time(self.interval_s)} ({best}), {text}"
        least = found.stretch(found.optimal_s)
        return (
            f"every {_time(self.interval_s)} as asked, {text}; best every "
            f"{_time(found.optimal_s)} ({best}): {1 / least:.1%} instead of {self.running:.1%}"
        )

    def _simulated(self, work_s: float | None) -> list[tuple[str, str]]:
        times = None if work_s is None else self.simulated_s(work_s)
        if times is None:
            return []
        low, high = (_time(each) for each in times)
        if low.split(" ")[-1] == high.split(" ")[-1]:
            low = low.split(" ")[0]
        without = "" if self.given.repair_s is None else ", without waits for nodes"
        text = f"{low} to {high} in 9 of 10 of {SIMULATIONS} simulated trainings{without}"
        return [("simulated", text)]

    def _spares(self) -> list[tuple[str, str]]:
        given = self.given
        if given.repair_s is None:
            text = "assumed to be ready at each failure; --reliability repair=TIME counts them"
            return [("spare nodes", text)]
        if (count := self.spares) is None:
            target = ENOUGH if given.goodput is None else given.goodput
            return [
                (
                    "spare nodes",
                    f"none reach a goodput of {target:.1%}: failures and checkpoints alone leave "
                    f"{self.running:.1%}",
                )
            ]
        other = sorted({0, max(count - 1, 0), count + 1} - {count})
        shares = ", ".join(f"{self.running * self.enough(each):.1%} with {each}" for each in other)
        nodes = f"{count} for {self.nodes:,} nodes of which each fails every"
        per_node = self.gpus_per_node if self.gpus > self.gpus_per_node else self.gpus
        often = _time(SECONDS_PER_HOUR / (self.failures * per_node)) if self.failures else "never"
        return [
            (
                "spare nodes",
                f"{nodes} {often} and is back after {_time(given.repair_s)}: enough nodes work "
                f"{self.enough(count):.2%} of the time; goodput {self.goodput:.1%}, {shares}",
            )
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the goodput and its parts; names end in units."""
        found = self.interruptions
        repairs = self.given.repair_s is not None
        return {
            "goodput": self.goodput,
            "failures_per_gpu_hour": self.failures,
            "failures_source": FAILURES_SOURCE if self.given.failures is None else "asked",
            "between_failures_s": _finite(found.between_s),
            "checkpoint_bytes": self.bytes,
            "checkpoint_s": found.checkpoint_s,
            "restart_s": found.restart_s,
            "interval_s": _finite(self.interval_s),
            "interval_young_s": _finite(found.young_s),
            "interval_daly_s": _finite(found.daly_s),
            "interval_optimal_s": _finite(found.optimal_s),
            "spare_nodes": self.spares if repairs else None,
            "enough_nodes": (
                self.enough(self.spares) if repairs and self.spares is not None else None
            ),
        }


def _finite(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None


UNITS: Final = (("days", SECONDS_PER_DAY), ("h", 3600), ("min", 60), ("s", 1))


def _time(seconds: float) -> str:
    """Return a time with three digits, in years, days, hours, minutes or seconds."""
    if seconds >= SECONDS_PER_YEAR:
        return f"{seconds / SECONDS_PER_YEAR:,.3g} years"
    for unit, size in UNITS:
        if seconds >= 2 * size or size == 1:
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError
