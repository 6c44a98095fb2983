"""Predictions for many measured configurations at once; what no constant changes is kept."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from zsim.calibration.least_squares import Array
from zsim.calibration.measured import Measurement
from zsim.cluster.profile.network import NetworkProfile, Terms, timing
from zsim.network.algorithm import direct
from zsim.network.algorithm.activity import Algorithm, Collective, Protocol, Shape
from zsim.network.tuner import Bandwidths, candidates, ranks_on_a_node, terms


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
    """Predicts what `tuner.alone_s` says of each of `all_points`."""

    def __init__(self, all_points: Sequence[Point]) -> None:
        self._count = len(all_points)
        rows: defaultdict[tuple[Algorithm, Protocol], list[tuple[int, Terms[float]]]]
        rows = defaultdict(list)
        for number, point in enumerate(all_points):
            for algorithm, protocol, done in candidates(point.collective, point.shape):
                if algorithm is Algorithm.HIERARCHICAL:
                    continue
                found = terms(
                    point.collective, point.size_bytes, point.shape, done=done, links=point.links
                )
                rows[algorithm, protocol].append((number, found))
        self._ways = [
            (*way, np.array([number for number, _ in found]), _stacked([t for _, t in found]))
            for way, found in rows.items()
        ]
        ranks = np.array([ranks_on_a_node(point.shape) for point in all_points])
        self._ranks = {int(each): ranks == each for each in set(ranks.tolist())}
        self._peers = np.array(
            [direct.peers(point.collective, point.shape) for point in all_points]
        )

    def seconds(self, profile: NetworkProfile) -> Array:
        """Seconds of each point, with the constants of `profile`."""
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
        seconds: Array = np.maximum(best, profile.launch_s + self._peers * profile.pair_s)
        return seconds


def _stacked(found: Sequence[Terms[float]]) -> Terms[Array]:
    columns = {
        field.name: np.array([getattr(each, field.name) for each in found], dtype=np.float64)
        for field in fields(Terms)
    }
    return Terms(**columns)
