"""How fabrics carry collectives of many nodes: the clusters that tell, and what others get of them.

Few clusters were measured on many nodes, and they differ by more than anything else here. So each
is a fabric with a name, which every profile has. Of a fabric that nobody measured so, the middle
one is predicted, and the least and the most congested one are its band.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, median

from zsim.calibration.collective_rows import SCALED, Measurement
from zsim.calibration.constants import FABRIC, SCALE
from zsim.calibration.hardware import GPUS, speaks_verbs
from zsim.calibration.network_fit import fitted
from zsim.calibration.network_verdict import JudgedMeasurement, judged
from zsim.cluster.profile.files import Profiles
from zsim.cluster.profile.network import NetworkProfile
from zsim.network.band import slowed

AT_SCALE = ("nccl_issue_1218", "nccl_issue_1229", "ultrascale_playbook")
"""Systems that were measured on 32 and more nodes."""

Fabrics = Mapping[str, Mapping[str, float]]
"""Constants of fabrics at scale (SCALE and "tail"), by name, the least congested first."""


def tells_scale(row: Measurement) -> bool:
    """Return whether the system of `row` was measured on many nodes, in single values."""
    return row.file in SCALED and row.shape.nodes > 1 and row.system in AT_SCALE


def fabrics_of(
    found: Sequence[Profiles], rows: Sequence[Measurement], usual: Mapping[str, float]
) -> Fabrics:
    """Return the fabrics of clusters that were measured on many nodes.

    Three constants of each are fitted to its collectives over several nodes, or congestion alone
    where there are fewer of them; all else is that of its GPU and of a `usual` fabric.
    """
    clusters: dict[str, dict[str, float]] = {}
    for profiles in found:
        start = profiles.shared.changed(**usual)
        for name in AT_SCALE:
            own = [row for row in rows if (row.gpu, row.system) == (profiles.gpu, name)]
            own = [row for row in own if tells_scale(row)]
            if own:
                free = SCALE if len(own) >= len(SCALE) else SCALE[-1:]
                fit = fitted(own, start, free=free)
                alone = replace(profiles, systems={}, shared=fit.shared)
                constants = {each: fit.shared[each] for each in SCALE}
                clusters[name] = constants | {"tail": _tail(alone, own)}
    return dict(sorted(clusters.items(), key=lambda item: item[1]["congestion"]))


def _tail(profiles: Profiles, rows: Sequence[Measurement]) -> float:
    """Return how many times as long crossing takes in the slowest runs that were published.

    It is the least with which every run that has a band is predicted to be as slow as that.
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
    """Return the congestion of a fabric that nobody measured: the median."""
    if not fabrics:
        return {}
    return {"congestion": median(each["congestion"] for each in fabrics.values())}


def usual_fabric(found: Sequence[Profiles], rows: Sequence[Measurement]) -> dict[str, float]:
    """Return the constants of an ordinary fabric, between two nodes.

    That is the geometric mean over systems with verbs that were timed often enough across nodes.
    """
    crossing = Counter((row.gpu, row.system) for row in rows if row.shape.nodes > 1)
    swept = {each for each, count in crossing.items() if count > len(SCALE)}
    known = [
        profiles.systems[system]
        for profiles in found
        for system in sorted(profiles.systems)
        if (profiles.gpu, system) in swept and speaks_verbs(system, profiles.gpu)
    ]
    names = [name for name in FABRIC if name != "congestion"]
    return {name: geometric_mean(each[name] for each in known) for name in names if known}


def hops_at_scale(
    found: Sequence[Profiles], fast: Sequence[Measurement], usual: Mapping[str, float]
) -> dict[str, float]:
    """Return what a hop between nodes costs a large message, from the fastest runs on many nodes.

    While nobody else is on the fabric there is no congestion, and hops alone grow with the nodes.
    Sweeps over two nodes have two of them, and cannot tell them from bytes.
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
    """Return `profiles` with what its own rows do not tell of crossing nodes.

    What was never measured across nodes gets the `usual` fabric, so do the shared constants,
    unless the node of this GPU is a rack. What was measured across no more than two gets the
    congestion of the middle of `fabrics`; and every fabric is there by its name. A system in `seen`
    has said what its NICs carry, and keeps that.
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
    """Return `system` with `usual` hops of large messages, if it speaks verbs and `rows` allow it.

    Bytes and what crossing costs once are fitted again beside them. Rows do not allow it that are
    then a quarter further off, which is to say that they tell their hops.
    """
    own = profiles.systems[system]
    if "far_fill_s" not in usual or not speaks_verbs(system, profiles.gpu):
        return own
    start = own.changed(far_fill_s=usual["far_fill_s"])
    found = fitted(rows, start, free=("nic", "far_base_s")).shared
    before, after = (
        fmean(each.error for each in judged(replace(profiles, systems={}, shared=by), rows))
        for by in (own, found)
    )
    return found if after <= 1.25 * before else own


def left_out(found: Sequence[Profiles], rows: Sequence[Measurement], fabrics: Fabrics) -> list[str]:
    """Return, a line for each fabric, how well the others alone predict it."""
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
