"""Predictions for many measured configurations at once; parts without constants are cached."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np
import numpy.typing as npt

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm import direct
from zsim.network.algorithm.activity import Collective, GroupShape, Protocol
from zsim.network.algorithm.algorithm import Algorithm, Bandwidths, Request, Terms
from zsim.network.algorithm.constant import LAUNCH_S
from zsim.network.algorithm.installed_algorithms import algorithms
from zsim.network.tuner import ranks_on_a_node
from zsim_lab.fit.least_squares import Array
from zsim_lab.rows.collective_rows import Measurement

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration, measured once or several times; `seconds` is the median."""

    collective: Collective
    shape: GroupShape
    size_bytes: int
    links: Bandwidths
    seconds: float


def points(rows: Collection[Measurement]) -> list[Point]:
    """Return the configurations in `rows`, separately by system, in order of appearance."""
    found: defaultdict[tuple[str, str, Collective, GroupShape, int, Bandwidths], list[float]]
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
    """Predicts the result of `tuner.alone_s` for each of `all_points`."""

    def __init__(self, all_points: Sequence[Point]) -> None:
        self._count = len(all_points)
        rows: defaultdict[tuple[Algorithm, Protocol], list[tuple[int, Terms[float]]]]
        rows = defaultdict(list)
        for number, point in enumerate(all_points):
            request = Request(
                collective=point.collective,
                size_bytes=point.size_bytes,
                shape=point.shape,
                links=point.links,
            )
            for algorithm in algorithms().values():
                done = algorithm.link_bytes(point.collective, point.shape)
                if done is not None:
                    found = number, algorithm.terms(request, done)
                    for protocol in algorithm.protocols:
                        rows[algorithm, protocol].append(found)
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
        """Return the seconds of each point with the constants of `profile`."""
        considered = {each: self._considered(profile, each) for each in algorithms().values()}
        best = np.full(self._count, np.inf)
        for algorithm, protocol, numbers, found in self._ways:
            here = considered[algorithm][numbers]
            if not here.any():
                continue
            took = algorithm.timing(profile, protocol, found)
            total = took.latency_s + np.maximum(took.gpu_s, took.node_s)
            best[numbers] = np.minimum(best[numbers], np.where(here, total, np.inf))
        host_s = LAUNCH_S.of(profile) + self._peers * direct.PAIR_S.of(profile)
        seconds: Array = np.maximum(best, host_s)
        return seconds

    def _considered(self, profile: NetworkProfile, algorithm: Algorithm) -> Flags:
        """Return the mask of points for which the tuner considers an algorithm."""
        found = np.zeros(self._count, dtype=np.bool_)
        for ranks, there in self._ranks.items():
            if algorithm.is_considered(profile, ranks):
                found |= there
        return found


def _stacked(found: Sequence[Terms[float]]) -> Terms[Array]:
    columns = {
        field.name: np.array([getattr(each, field.name) for each in found], dtype=np.float64)
        for field in fields(Terms)
        if field.name != "own"
    }
    own = {
        name: np.array([each.own[name] for each in found], dtype=np.float64)
        for name in found[0].own
    }
    return Terms(**columns, own=own)
