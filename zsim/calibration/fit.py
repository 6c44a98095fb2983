"""The fit: constants that bring the median of the errors down, by search along each of them.

The loss is the mean of |log(predicted / measured)|, in which a few wild rows do not pull on the
rest, plus a price on every constant that leaves its start. Each configuration that was measured
several times counts once, by its median. The search is deterministic: each constant in turn is
multiplied up and down, by steps that grow with success and shrink without, from a few places.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

import numpy as np
from numpy.typing import NDArray

from zsim.calibration.measured import Measurement
from zsim.collective.activity import Algorithm, Collective, Protocol, Shape
from zsim.collective.profile import NAMES, NetworkProfile, Terms, timing
from zsim.collective.tuner import Bandwidths, candidates, peers, ranks_on_a_node, terms

Array = NDArray[np.float64]

START = NetworkProfile(
    launch_s=12e-6,
    pair_s=8e-6,
    base_s=6e-6,
    ll_hop_s=1e-6,
    ll128_hop_s=1.5e-6,
    simple_hop_s=3e-6,
    far_base_s=20e-6,
    far_hop_s=6e-6,
    link=0.85,
    ll=0.25,
    ll128=0.8,
    tree=0.85,
    direct=0.8,
    nvls=0.68,
    nvls_choice=0.64,
    nic=0.9,
    copy=2.0,
    add=2.0,
    fill_s=40e-6,
    fill_bytes=16e6,
    nvls_fill_s=60e-6,
    nvls_fill_bytes=40e6,
    direct_fill_s=40e-6,
    direct_fill_bytes=16e6,
    far_fill_s=100e-6,
    far_fill_bytes=64e6,
)
"""Where a search begins, of the order of what NCCL's tuner assumes; data move what they name."""

CHOICES = (0.6125, 0.64, 0.69)
"""Values of nvls_choice: from 6, from 5 or from 4 ranks on."""

OF_LINKS = frozenset({"link", "ll", "ll128", "tree", "direct", "ll_hop_s", "ll128_hop_s"})
"""Constants that all systems with one kind of GPU share."""

OF_FABRIC = ("far_base_s", "far_hop_s", "nic", "far_fill_s", "far_fill_bytes")
"""Constants that only rows from several nodes speak of."""

BOUNDS = (
    ("fill_s", (1e-6, 1e-3)),
    ("_bytes", (1e5, 1e9)),
    ("launch_s", (2e-6, 1e-4)),
    ("pair_s", (1e-6, 5e-5)),
    ("far_base_s", (1e-6, 1e-3)),
    ("far_hop_s", (1e-6, 1e-3)),
    ("base_s", (1e-6, 1e-4)),
    ("hop_s", (1e-7, 2e-5)),
    ("ll128", (0.3, 0.95)),  # 1 of 16 words is a flag
    ("ll", (0.05, 0.5)),  # 1 of 2 is
    ("nvls_choice", (0.5, 1.0)),
    ("nic", (0.7, 1.0)),
    ("copy", (0.8, 10.0)),
    ("add", (0.8, 10.0)),
    ("", (0.4, 1.0)),  # the other shares of the link
)
"""Least and most that a constant may be, by the end of its name: the first that matches."""

RACK_NIC = 0.2
"""Where the search for `nic` begins if a rack is one node: few channels do not fill its NICs."""

SMALL_BYTES = 64 * 2**10
SMALL_WEIGHT = 0.15  # below 64 KiB a benchmark measures its host more than its network
PRICE = 0.001  # of leaving the start by a factor e, in mean error
FIRST_STEP, LAST_STEP = 0.3, 1e-3
LEAPS = (0.25, 0.5, 2.0, 4.0)  # tried once for each constant: what lies across a plateau
SWEEPS = 60
SEED, ATTEMPTS, SPREAD = 0, 6, 0.5  # searches; all but the first begin where a shake leads


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration, measured once or often; `seconds` is the median."""

    collective: Collective
    shape: Shape
    size_bytes: int
    links: Bandwidths
    seconds: float


def points(rows: Collection[Measurement]) -> list[Point]:
    """Configurations in `rows`, in order of appearance. Systems are told apart."""
    found: defaultdict[tuple[str, str, Collective, Shape, int, Bandwidths], list[float]]
    found = defaultdict(list)
    for row in rows:
        key = (row.file, row.system, row.collective, row.shape, row.size_bytes, row.links)
        found[key].append(row.seconds)
    return [
        Point(
            collective=key[2], shape=key[3], size_bytes=key[4], links=key[5], seconds=median(all_)
        )
        for key, all_ in found.items()
    ]


class Predictor:
    """Predicts many configurations at once. What does not depend on constants is kept."""

    def __init__(self, all_points: Sequence[Point]) -> None:
        self._count = len(all_points)
        rows: defaultdict[tuple[Algorithm, Protocol], list[tuple[int, Terms[float]]]]
        rows = defaultdict(list)
        for number, point in enumerate(all_points):
            for algorithm, protocol, done in candidates(point.collective, point.shape):
                if algorithm is Algorithm.HIERARCHICAL:
                    continue
                found = terms(point.collective, point.size_bytes, done, point.links)
                rows[algorithm, protocol].append((number, found))
        self._ways = [
            (*way, np.array([number for number, _ in found]), _stacked([t for _, t in found]))
            for way, found in rows.items()
        ]
        ranks = np.array([ranks_on_a_node(point.shape) for point in all_points])
        self._ranks = {int(each): ranks == each for each in set(ranks.tolist())}
        self._peers = np.array([peers(point.collective, point.shape) for point in all_points])

    def seconds(self, profile: NetworkProfile) -> Array:
        """What `tuner.alone_s` says of each configuration."""
        reduces = np.zeros(self._count, dtype=np.bool_)
        for ranks, there in self._ranks.items():
            if profile.chooses(Algorithm.NVLS, ranks):
                reduces |= there
        best = np.full(self._count, np.inf)
        for algorithm, protocol, numbers, found in self._ways:
            if algorithm is Algorithm.NVLS and not profile.nvls:
                continue
            took = timing(profile, algorithm, protocol, found)
            total = took.latency_s + np.maximum(took.gpu_s, took.node_s)
            if algorithm is Algorithm.NVLS:
                total = np.where(reduces[numbers], total, np.inf)
            best[numbers] = np.minimum(best[numbers], total)
        direct_s = profile.base_s + self._peers * profile.pair_s
        host_s = np.where(self._peers > 0, direct_s, profile.launch_s)
        seconds: Array = np.maximum(best, host_s)
        return seconds


def _stacked(found: Sequence[Terms[float]]) -> Terms[Array]:
    def column(name: str) -> Array:
        return np.array([getattr(each, name) for each in found], dtype=np.float64)

    return Terms(
        gpu_s=column("gpu_s"),
        node_s=column("node_s"),
        copy_s=column("copy_s"),
        add_s=column("add_s"),
        link_bytes=column("link_bytes"),
        near_hops=column("near_hops"),
        far_hops=column("far_hops"),
        crosses=column("crosses"),
    )


class _Loss:
    """The mean error of constants on `all_points`, plus the price of leaving `start`."""

    def __init__(self, all_points: Sequence[Point], start: NetworkProfile) -> None:
        self._predictor = Predictor(all_points)
        self._measured = np.log(np.array([point.seconds for point in all_points]))
        small = np.array([point.size_bytes < SMALL_BYTES for point in all_points])
        self._weights = np.where(small, SMALL_WEIGHT, 1.0)
        self._start = start

    def __call__(self, profile: NetworkProfile) -> float:
        errors = np.abs(np.log(self._predictor.seconds(profile)) - self._measured)
        moved = sum(
            abs(log(getattr(profile, name) / getattr(self._start, name)))
            for name in NAMES
            if getattr(self._start, name)
        )
        return float((self._weights * errors).sum() / self._weights.sum()) + PRICE * moved


def fitted(
    all_points: Sequence[Point], start: NetworkProfile, free: Collection[str]
) -> NetworkProfile:
    """`start` with the constants named in `free` moved to where they fit `all_points` best."""
    loss = _Loss(all_points, start)
    searched = [name for name in NAMES if name in free and getattr(start, name)]
    choices = [start.nvls_choice]
    if "nvls_choice" in searched:
        searched.remove("nvls_choice")
        if start.nvls and any(point.shape.ranks_per_node in {4, 5} for point in all_points):
            choices = list(CHOICES)
    random = np.random.default_rng(SEED)
    found: list[NetworkProfile] = []
    for choice in choices:
        begin = replace(start, nvls_choice=choice)
        for attempt in range(ATTEMPTS):
            spread = random.normal(scale=SPREAD, size=len(searched)) if attempt else np.zeros(0)
            for name, shift in zip(searched, spread, strict=False):
                begin = _bounded(begin, name, getattr(start, name) * exp(float(shift)))
            found.append(_searched(loss, begin, searched))
    return min(found, key=loss)


def _searched(loss: _Loss, start: NetworkProfile, names: Sequence[str]) -> NetworkProfile:
    best = start
    for name in names:
        leaps = [_bounded(best, name, getattr(best, name) * leap) for leap in LEAPS]
        best = min([best, *leaps], key=loss)
    least = loss(best)
    steps = dict.fromkeys(names, FIRST_STEP)
    for _ in range(SWEEPS):
        for name in names:
            for sign in (1, -1):
                value = getattr(best, name) * exp(sign * steps[name])
                moved = _bounded(best, name, value)
                tried = loss(moved)
                if tried < least - 1e-9:
                    best, least = moved, tried
                    steps[name] *= 1.5
                    break
            else:
                steps[name] *= 0.5
        if max(steps.values(), default=0) < LAST_STEP:
            break
    return best


def _bounded(profile: NetworkProfile, name: str, value: float) -> NetworkProfile:
    low, high = next(limits for end, limits in BOUNDS if name.endswith(end))
    if name == "nic" and profile.nic < low:  # a rack, see RACK_NIC
        low = RACK_NIC / 4
    return replace(profile, **{name: min(max(value, low), high)})
