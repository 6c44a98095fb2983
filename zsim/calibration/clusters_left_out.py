"""Collectives of a cluster that nobody measured: each cluster is left out, and the others fitted.

What is then known of it is what a user knows of a new one, its GPU and its NICs. Beside the
prediction stands the best that needs no model: the time that another cluster with the same GPU took
for the very same collective.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from zsim.calibration.collective_rows import Measurement
from zsim.calibration.network_profiles import calibrated
from zsim.calibration.network_verdict import JudgedMeasurement, judged

Cluster = tuple[str, str]
"""The kind of GPU and the name of a system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLeftOut:
    """A cluster that no constant was fitted to.

    Attributes:
        judged: its rows with what the others predict; none where no other has its GPU.
    """

    cluster: Cluster
    judged: tuple[JudgedMeasurement, ...]


def clusters_of(rows: Sequence[Measurement]) -> list[Cluster]:
    """Return every cluster that was measured."""
    return sorted({(row.gpu, row.system) for row in rows})


def left_out(rows: Sequence[Measurement], cluster: Cluster) -> ClusterLeftOut:
    """Return `cluster` as a fit to the rows of all others predicts it."""
    rest = [row for row in rows if (row.gpu, row.system) != cluster]
    own = [row for row in rows if (row.gpu, row.system) == cluster]
    found = {each.gpu: each for each in calibrated(rest, report=_tell_nobody, holds_out=False)}
    gpu = cluster[0]
    if gpu not in found:
        return ClusterLeftOut(cluster=cluster, judged=())
    unknown = replace(found[gpu], systems={})
    return ClusterLeftOut(cluster=cluster, judged=tuple(judged(unknown, own)))


def by_another(rows: Sequence[Measurement]) -> list[JudgedMeasurement]:
    """Return rows predicted by the medians of each other cluster that measured the very same.

    That is the same GPU, collective, ranks, nodes and size.
    """
    taken: defaultdict[tuple[object, ...], defaultdict[str, list[float]]]
    taken = defaultdict(lambda: defaultdict(list))
    for row in rows:
        taken[_configuration(row)][row.system].append(row.seconds)
    return [
        JudgedMeasurement(measurement=row, predicted_s=median(seconds))
        for row in rows
        for system, seconds in taken[_configuration(row)].items()
        if system != row.system
    ]


def _configuration(row: Measurement) -> tuple[object, ...]:
    return row.gpu, row.collective, row.shape, row.size_bytes


def _tell_nobody(line: str) -> None:
    del line
