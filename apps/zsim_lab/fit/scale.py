"""Constants of fabrics for collectives on many nodes, and their transfer to other clusters.

Few clusters were measured on many nodes, and they differ more than anything else here. So each is a
named fabric that every profile has. For any other fabric, the median one is predicted, and the
least and the most congested one are its band.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, median

from zsim.cluster.profile.files import Profiles
from zsim.cluster.profile.network import NetworkProfile
from zsim.network.band import slowed
from zsim_lab.fit.constants import FABRIC, SCALE
from zsim_lab.fit.network_fit import fitted
from zsim_lab.rows.collective_rows import SCALED, Measurement
from zsim_lab.rows.hardware import GPUS, uses_verbs
from zsim_lab.verdict.network_verdict import JudgedMeasurement, judged

AT_SCALE = ("nccl_issue_1218", "nccl_issue_1229", "ultrascale_playbook")
"""Systems that were measured on 32 or more nodes."""

Fabrics = Mapping[str, Mapping[str, float]]
"""Constants of fabrics at scale (SCALE and "tail"), by name, the least congested first."""


def is_at_scale(row: Measurement) -> bool:
    """Return True if the system of `row` was measured on many nodes, as single values."""
    return row.file in SCALED and row.shape.nodes > 1 and row.system in AT_SCALE


def fabrics_of(
    found: Sequence[Profiles], rows: Sequence[Measurement], usual: Mapping[str, float]
) -> Fabrics:
    """Return the fabrics of clusters that were measured on many nodes.

    Three constants of each are fitted to its collectives over several nodes; with fewer rows, only
    congestion. All other constants are those of its GPU and of a `usual` fabric.
    """
    clusters: dict[str, dict[str, float]] = {}
    for profiles in found:
        start = profiles.shared.changed(**usual)
        for name in AT_SCALE:
            own = [row for row in rows if (row.gpu, row.system) == (profiles.gpu, name)]
            own = [row for row in own if is_at_scale(row)]
            if own:
                free = SCALE if len(own) >= len(SCALE) else SCALE[-1:]
                fit = fitted(own, start, free=free)
                alone = replace(profiles, systems={}, shared=fit.shared)
                constants = {each: fit.shared[each] for each in SCALE}
                clusters[name] = constants | {"tail": _tail(alone, own)}
    return dict(sorted(clusters.items(), key=lambda item: item[1]["congestion"]))


def _tail(profiles: Profiles, rows: Sequence[Measurement]) -> float:
    """Return the slowdown of communication between nodes in the slowest published runs.

    It is the smallest factor with which all rows with a band are predicted as slow as its slow end.
    """
    tail = 1.0
    for row in rows:
        while row.band is not None and _slowed_s(profiles, row, tail) < row.band[1]:
            tail *= 1.01
    return tail


def _slowed_s(profiles: Profiles, row: Measurement, times: float) -> float:
    (found,) = judged(replace(profiles, shared=slowed(profiles.shared, times)), [row])
    return found.predicted_s


def middle(fabrics: Fabrics) -> dict[str, float]:
    """Return the congestion of a fabric without measurements: the median."""
    if not fabrics:
        return {}
    return {"congestion": median(each["congestion"] for each in fabrics.values())}


def usual_fabric(found: Sequence[Profiles], rows: Sequence[Measurement]) -> dict[str, float]:
    """Return the constants of an ordinary fabric between two nodes.

    They are the geometric mean over InfiniBand systems with enough measurements across nodes.
    """
    crossing = Counter((row.gpu, row.system) for row in rows if row.shape.nodes > 1)
    swept = {each for each, count in crossing.items() if count > len(SCALE)}
    known = [
        profiles.systems[system]
        for profiles in found
        for system in sorted(profiles.systems)
        if (profiles.gpu, system) in swept and uses_verbs(system, profiles.gpu)
    ]
    names = [name for name in FABRIC if name != "congestion"]
    return {name: geometric_mean(each[name] for each in known) for name in names if known}


def hops_at_scale(
    found: Sequence[Profiles], fast: Sequence[Measurement], usual: Mapping[str, float]
) -> dict[str, float]:
    """Return the cost of a hop between nodes of a large message, from the fastest runs.

    Without other traffic there is no congestion, so only hops grow with the number of nodes. Sweeps
    over two nodes always have two hops and cannot separate them from bytes.
    """
    for profiles in found:
        own = [row for row in fast if row.gpu == profiles.gpu]
        if own:
            start = profiles.shared.changed(**usual, congestion=0.0)
            fit = fitted(own, start, free=("nic", "far_fill_s"))
            return {"far_fill_s": fit.shared["far_fill_s"]}
    return {}


def with_fabrics(
    profiles: Profiles,
    rows: Sequence[Measurement],
    usual: Mapping[str, float],
    fabrics: Fabrics,
    *,
    seen: Mapping[str, object],
) -> Profiles:
    """Return `profiles` with constants of fabrics that its own rows do not determine.

    Systems never measured across nodes, and the shared constants, get the `usual` fabric, unless
    the node of this GPU is a rack. Systems measured on two nodes get the congestion of the median
    of `fabrics`. Every fabric is added by its name. A system in `seen` keeps its published NIC
    bandwidth.
    """
    if GPUS[profiles.gpu].is_rack:
        return profiles
    nodes: dict[str, int] = {}
    for row in rows:
        if row.gpu == profiles.gpu:
            nodes[row.system] = max(nodes.get(row.system, 1), row.shape.nodes)
    unknown = {**usual, **middle(fabrics)}
    systems = dict(profiles.systems)
    for name, system in systems.items():
        if nodes.get(name, 1) == 1:
            kept = {"nic": system["nic"]} if name in seen else {}
            systems[name] = system.changed(**{**unknown, **kept})
        elif nodes[name] == 2:
            own = [row for row in rows if (row.gpu, row.system) == (profiles.gpu, name)]
            known = _with_hops(profiles, name, own, usual)
            systems[name] = known.changed(**middle(fabrics))
    shared = profiles.shared.changed(**unknown)
    for name, constants in fabrics.items():
        systems[name] = systems.get(name, shared).changed(**{**usual, **constants})
    return replace(profiles, shared=shared, systems=systems, fabrics=tuple(fabrics))


def _with_hops(
    profiles: Profiles, system: str, rows: Sequence[Measurement], usual: Mapping[str, float]
) -> NetworkProfile:
    """Return `system` with `usual` hops of large messages, if it uses InfiniBand and `rows` fit.

    The bandwidth and the base cost of crossing nodes are fitted again with these hops. If the
    errors then grow by more than a quarter, the rows determine the hops, and `system` is unchanged.
    """
    own = profiles.systems[system]
    if "far_fill_s" not in usual or not uses_verbs(system, profiles.gpu):
        return own
    start = own.changed(far_fill_s=usual["far_fill_s"])
    found = fitted(rows, start, free=("nic", "far_base_s")).shared
    before, after = (
        fmean(each.error for each in judged(replace(profiles, systems={}, shared=by), rows))
        for by in (own, found)
    )
    return found if after <= 1.25 * before else own


def left_out(found: Sequence[Profiles], rows: Sequence[Measurement], fabrics: Fabrics) -> list[str]:
    """Return a line for each fabric: how well the other fabrics predict it."""
    lines: list[str] = []
    for name in fabrics:
        others = {other: each for other, each in fabrics.items() if other != name}
        for profiles in found:
            own = [row for row in rows if (row.gpu, row.system) == (profiles.gpu, name)]
            own = [row for row in own if row.shape.nodes > 1]
            if own and others:
                lines.append(f"{name} left out: {_without(profiles, own, others)}")
    return lines


def _without(profiles: Profiles, rows: Sequence[Measurement], others: Fabrics) -> str:
    def predicted(constants: Mapping[str, float]) -> list[JudgedMeasurement]:
        shared = profiles.shared.changed(**constants)
        return judged(replace(profiles, systems={}, shared=shared), rows)

    errors = [each.error for each in predicted(middle(others))]
    times = zip(*(predicted(each) for each in others.values()), strict=True)
    inside = [
        min(each.predicted_s for each in bounds)
        <= row.seconds
        <= max(each.predicted_s for each in bounds)
        for row, bounds in zip(rows, times, strict=True)
    ]
    return (
        f"{median(errors):.0%} off in the median, {sum(inside)} of {len(inside)} inside the band "
        "of the others"
    )
