"""Fit profiles to measurements: shared constants of each kind of GPU, and exceptions of systems.

To measure errors, each group of rows - a file, hardware, collective and group size - is held out
once: everything is fitted without it, and it is predicted. The written constants are fitted to all
rows. The kind of GPU with the most rows is fitted first; the others start from its constants
(except for hosts and fabrics), and keep constants without own rows. Between nodes, InfiniBand is
assumed unless a system measured another transport: GPUs differ less there than transports. A GPU
with only link measurements is scaled from the GPU with the most rows whose switch does not reduce
either. A GPU without any has the constants of the `nearest` one that its file names.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from zsim.cluster.profile.files import Profiles
from zsim.cluster.profile.network import NetworkProfile
from zsim.files.installed import topology, usual_nodes
from zsim_lab.fit.constants import FABRIC, IN_TRAINING, RACK_NIC, START
from zsim_lab.fit.network_fit import fitted
from zsim_lab.fit.scale import (
    fabrics_of,
    hops_at_scale,
    is_at_scale,
    left_out,
    usual_fabric,
    with_fabrics,
)
from zsim_lab.rows.collective_rows import Measurement, fastest, stated_fabric
from zsim_lab.rows.hardware import GPUS, UNNAMED
from zsim_lab.rows.link_rows import TimedLinks, scaled
from zsim_lab.verdict.network_verdict import SIZE_CLASSES, JudgedMeasurement, judged, size_class


def calibrated(
    rows: Sequence[Measurement],
    *,
    links: Mapping[str, Sequence[TimedLinks]] | None = None,
    report: Callable[[str], None],
    holds_out: bool = True,
) -> list[Profiles]:
    """Return profiles of every kind of GPU in `rows` and `links` (by kind of GPU).

    `report` receives progress, and the errors of predicting each fabric from the others. Without
    `holds_out`, no group is held out, which saves most of the time.
    """
    found: list[Profiles] = []
    stated = {row.system: row for row in map(stated_fabric, rows) if row}
    alone = [each for each in map(fastest, rows) if each]
    used = [*(row for row in rows if not is_at_scale(row)), *stated.values()]
    counts = Counter(row.gpu for row in used)
    start = START
    for gpu, count in counts.most_common():
        of_gpu = [row for row in used if row.gpu == gpu]
        report(f"{gpu}: {count} rows")
        profiles = _fitted(gpu, of_gpu, start)
        errors = _medians("fitted", judged(profiles, of_gpu))
        if holds_out:
            errors |= _medians("held_out", _held_out(gpu, of_gpu, start))
        found.append(replace(profiles, errors=errors))
        near = found[0].shared
        others = {name: START[name] for name in (*FABRIC, "launch_s")}
        start = near.changed(nvls=near["nvls"] or START["nvls"], **others)
    usual = usual_fabric(found, used)
    usual |= hops_at_scale(found, alone, usual)
    fabrics = fabrics_of(found, rows, usual)
    found = [with_fabrics(each, rows, usual, fabrics, seen=stated) for each in found]
    for line in left_out(found, rows, fabrics):
        report(line)
    plain = [each for each in found if not GPUS[each.gpu].reduces and each.gpu != UNNAMED]
    for gpu, timed in (links or {}).items():
        if plain and gpu not in counts and (like := scaled(gpu, timed, plain[0])):
            report(f"{gpu}: {len(timed)} rows of links, scaled from {plain[0].gpu}")
            found.append(with_fabrics(like, (), {}, fabrics, seen={}))
    found = [_with_waits(each) for each in found]
    return [*found, *_unmeasured(found)]


def _unmeasured(found: Sequence[Profiles]) -> Iterator[Profiles]:
    """Yield profiles of GPUs without published collectives, scaled from the nearest GPU."""
    known = {each.gpu: each for each in found}
    for gpu in sorted(GPUS.keys() - known.keys() - {UNNAMED}):
        other = nearest_kind(gpu)
        if other in known:
            yield Profiles(
                gpu=gpu,
                shared=known[other].shared,
                systems={},
                scaled_from=other,
                errors={},
            )


def nearest_kind(kind: str) -> str | None:
    """Return the kind of GPU that the file of a kind names as its nearest; None if it names none.

    Raises:
        KeyError: no node that ships has this kind.
    """
    return topology(usual_nodes()[kind][0], "single_switch", 1).gpu.nearest


def _with_waits(profiles: Profiles) -> Profiles:
    """Return `profiles` with the constants that only training determines."""
    systems = {
        name: system.changed(**IN_TRAINING.get((profiles.gpu, name), {}))
        for name, system in profiles.systems.items()
    }
    return replace(profiles, systems=systems)


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
