"""Cross-validation by clusters: fit the collectives of all clusters except one, and predict it.

The prediction then knows as much as for a user's new cluster: its GPU and its NICs. It is compared
with the best prediction without a model: the time of another cluster with the same GPU for the
same collective.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from zsim_lab.fit.network_profiles import calibrated
from zsim_lab.rows.collective_rows import Measurement
from zsim_lab.verdict.network_verdict import JudgedMeasurement, judged

Cluster = tuple[str, str]
"""The kind of GPU and the name of a system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLeftOut:
    """A cluster that no constant was fitted to.

    Attributes:
        judged: its rows with predictions; empty if no other cluster has its GPU.
    """

    cluster: Cluster
    judged: tuple[JudgedMeasurement, ...]


def clusters_of(rows: Sequence[Measurement]) -> list[Cluster]:
    """Return every cluster that was measured."""
    return sorted({(row.gpu, row.system) for row in rows})


def left_out(rows: Sequence[Measurement], cluster: Cluster) -> ClusterLeftOut:
    """Return the predictions of `cluster` by a fit to the rows of all others."""
    rest = [row for row in rows if (row.gpu, row.system) != cluster]
    own = [row for row in rows if (row.gpu, row.system) == cluster]
    found = {each.gpu: each for each in calibrated(rest, report=_ignore_line, holds_out=False)}
    gpu = cluster[0]
    if gpu not in found:
        return ClusterLeftOut(cluster=cluster, judged=())
    unknown = replace(found[gpu], systems={})
    return ClusterLeftOut(cluster=cluster, judged=tuple(judged(unknown, own)))


def by_another(rows: Sequence[Measurement]) -> list[JudgedMeasurement]:
    """Return rows predicted by the medians of other clusters for the same configuration.

    A configuration is the GPU, collective, ranks, nodes and size.
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


def _ignore_line(line: str) -> None:
    del line
