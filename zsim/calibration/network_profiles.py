"""From measurements to profiles: one fit for each kind of GPU, one for what each system changes.

To see how far the constants carry, each group of rows - a file, hardware, collective and size of
group - is held out once: everything is fitted again without it, and it is predicted. The constants
that are written are fitted to all rows. The kind of GPU with most rows comes first; the others
start from its constants, but for those of its hosts and fabrics, and keep those of which their own
rows say nothing. What crosses nodes is InfiniBand unless a system measured something else: GPUs
differ there less than transports do. A GPU of which only links were timed is scaled from the one
with most rows whose switch does not reduce either.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, median

from zsim.calibration.collective_rows import SCALING, Measurement, stated_fabric
from zsim.calibration.constants import FABRIC, RACK_NIC, START
from zsim.calibration.hardware import GPUS, UNNAMED, speaks_verbs
from zsim.calibration.link_rows import TimedLinks, scaled
from zsim.calibration.network_fit import fitted
from zsim.calibration.network_verdict import SIZE_CLASSES, JudgedMeasurement, judged, size_class
from zsim.cluster.profile.files import Profiles
from zsim.cluster.profile.network import NetworkProfile


def calibrated(
    rows: Sequence[Measurement],
    *,
    links: Mapping[str, Sequence[TimedLinks]] | None = None,
    report: Callable[[str], None],
) -> list[Profiles]:
    """Return profiles of every kind of GPU in `rows` and `links`, which are by kind of GPU.

    The congested cluster is left to validation. `report` is told what is being done.
    """
    found: list[Profiles] = []
    measured = [row for row in rows if row.file != SCALING]
    stated = {row.system: row for row in map(stated_fabric, measured) if row}
    used = [*measured, *stated.values()]
    counts = Counter(row.gpu for row in used)
    start = START
    for gpu, count in counts.most_common():
        of_gpu = [row for row in used if row.gpu == gpu]
        report(f"{gpu}: {count} rows")
        profiles = _fitted(gpu, of_gpu, start)
        errors = _medians("fitted", judged(profiles, of_gpu))
        errors |= _medians("held_out", _held_out(gpu, of_gpu, start))
        found.append(replace(profiles, errors=errors))
        near = found[0].shared
        others = {name: START[name] for name in (*FABRIC, "launch_s")}
        start = near.changed(nvls=near["nvls"] or START["nvls"], **others)
    crossed = {(row.gpu, row.system) for row in measured if row.shape.nodes > 1}
    usual = _usual_fabric(found, crossed)
    found = [_with_fabric(each, crossed, usual, seen=stated) for each in found]
    plain = [each for each in found if not GPUS[each.gpu].reduces and each.gpu != UNNAMED]
    for gpu, timed in (links or {}).items():
        if plain and gpu not in counts and (like := scaled(gpu, timed, plain[0])):
            report(f"{gpu}: {len(timed)} rows of links, scaled from {plain[0].gpu}")
            found.append(like)
    return found


def _usual_fabric(
    found: Sequence[Profiles], crossed: Collection[tuple[str, str]]
) -> dict[str, float]:
    """Return constants of an ordinary InfiniBand fabric: geometric means over systems with one."""
    known = [
        profiles.systems[system]
        for profiles in found
        for system in sorted(profiles.systems)
        if (profiles.gpu, system) in crossed and speaks_verbs(system, profiles.gpu)
    ]
    if not known:
        return {}
    return {name: geometric_mean(each[name] for each in known) for name in FABRIC}


def _with_fabric(
    profiles: Profiles,
    crossed: Collection[tuple[str, str]],
    usual: Mapping[str, float],
    *,
    seen: Collection[str],
) -> Profiles:
    """Return what was never measured across nodes gets the `usual` fabric.

    So do the shared constants, unless the node of this GPU is a rack. A system in `seen` has said
    what its NICs carry, and keeps that.
    """
    if GPUS[profiles.gpu].is_rack:
        return profiles
    systems = dict(profiles.systems)
    for name, system in systems.items():
        if (profiles.gpu, name) not in crossed:
            kept = {"nic": system["nic"]} if name in seen else {}
            systems[name] = system.changed(**{**usual, **kept})
    return replace(profiles, shared=profiles.shared.changed(**usual), systems=systems)


def _held_out(
    gpu: str, rows: Sequence[Measurement], start: NetworkProfile
) -> list[JudgedMeasurement]:
    groups = sorted({row.group for row in rows})
    if len(groups) < 2:
        return []
    found: list[JudgedMeasurement] = []
    for group in groups:
        profiles = _fitted(gpu, [row for row in rows if row.group != group], start)
        found += judged(profiles, [row for row in rows if row.group == group])
    return found


def _fitted(gpu: str, rows: Sequence[Measurement], start: NetworkProfile) -> Profiles:
    hardware = GPUS[gpu]
    begin = start if hardware.reduces else start.changed(nvls=0.0)
    if hardware.is_rack:
        begin = begin.changed(nic=RACK_NIC)
    found = fitted(rows, begin)
    return Profiles(
        gpu=gpu,
        shared=found.shared,
        systems=found.systems,
        publications=tuple(sorted({publication(row.source) for row in rows})),
        errors={},
    )


def publication(source: str) -> str:
    """Return the repository and revision of a source, without the path of a file in it."""
    head, _, revision = source.partition("@")
    words = revision.split(" ")
    parts = head.removeprefix("github:").split("/")
    if not head.startswith("github:") or not words[0]:
        return source
    return f"github:{parts[0]}/{parts[1]}@{words[0]}"


def _medians(kind: str, all_judged: Sequence[JudgedMeasurement]) -> dict[str, float]:
    found: dict[str, float] = {}
    for size, name in SIZE_CLASSES.items():
        errors = [
            each.error for each in all_judged if size_class(each.measurement.size_bytes) == size
        ]
        if errors:
            found[f"{kind}_{name}"] = median(errors)
    return found
