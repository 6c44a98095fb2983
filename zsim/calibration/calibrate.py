"""From measurements to profiles: one fit for each kind of GPU, one for what each system changes.

To see how far the constants carry, each group of rows - a file, hardware, collective and size of
group - is held out once: everything is fitted again without it, and it is predicted. The constants
that are written are fitted to all rows. The kind of GPU with most rows comes first; the others
start from its constants, and keep those of which their own rows say nothing. What crosses nodes is
InfiniBand unless a system measured something else: GPUs differ there less than transports do.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

from zsim.calibration.fit import OF_FABRIC, OF_LINKS, RACK_NIC, START, fitted, points
from zsim.calibration.hardware import GPUS, speaks_verbs
from zsim.calibration.measured import SCALING, Measurement, stated_fabric
from zsim.collective.profile import NAMES, NetworkProfile
from zsim.collective.profiles import Profiles
from zsim.collective.tuner import alone_s

FOLDS = 4
MEDIUM_BYTES, LARGE_BYTES = 64 * 2**10, 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A measurement and what is predicted for it, in seconds."""

    measurement: Measurement
    predicted_s: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a fraction of the measured time."""
        return abs(self.predicted_s / self.measurement.seconds - 1)


def size_class(size_bytes: int) -> str:
    """In which of three classes errors are listed."""
    if size_bytes < MEDIUM_BYTES:
        return "below 64 KiB"
    return "64 KiB to 16 MiB" if size_bytes < LARGE_BYTES else "16 MiB and more"


def judged(profiles: Profiles, rows: Collection[Measurement]) -> list[Judged]:
    """Predictions for `rows`, which are of the GPU of `profiles`."""
    return [
        Judged(
            measurement=row,
            predicted_s=alone_s(
                profiles.of(row.system),
                row.collective,
                row.size_bytes,
                row.shape,
                links=row.links,
            ),
        )
        for row in rows
    ]


def calibrated(rows: Sequence[Measurement], *, report: Callable[[str], None]) -> list[Profiles]:
    """Profiles of every kind of GPU in `rows`. The congested cluster is left to validation.

    `report` is told what is being done.
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
        far = {name: getattr(START, name) for name in OF_FABRIC}
        start = replace(near, nvls=near.nvls or START.nvls, **far)
    crossed = {(row.gpu, row.system) for row in measured if row.shape.nodes > 1}
    usual = _usual_fabric(found, crossed)
    return [_with_fabric(each, crossed, usual, seen=stated) for each in found]


def _usual_fabric(
    found: Sequence[Profiles], crossed: Collection[tuple[str, str]]
) -> dict[str, float]:
    """Constants of an ordinary InfiniBand fabric: the geometric mean over systems with one."""
    known = [
        profiles.systems[system]
        for profiles in found
        for system in sorted(profiles.systems)
        if (profiles.gpu, system) in crossed and speaks_verbs(system, profiles.gpu)
    ]
    if not known:
        return {}
    return {name: geometric_mean(getattr(each, name) for each in known) for name in OF_FABRIC}


def _with_fabric(
    profiles: Profiles,
    crossed: Collection[tuple[str, str]],
    usual: Mapping[str, float],
    *,
    seen: Collection[str],
) -> Profiles:
    """What was never measured across nodes gets the `usual` fabric.

    So do the shared constants, unless the node of this GPU is a rack. A system in `seen` has said
    what its NICs carry, and keeps that.
    """
    if GPUS[profiles.gpu].is_rack:
        return profiles
    systems = dict(profiles.systems)
    for name, system in systems.items():
        if (profiles.gpu, name) not in crossed:
            kept = {"nic": system.nic} if name in seen else {}
            systems[name] = replace(system, **{**usual, **kept})
    return replace(profiles, shared=replace(profiles.shared, **usual), systems=systems)


def _held_out(gpu: str, rows: Sequence[Measurement], start: NetworkProfile) -> list[Judged]:
    groups = sorted({row.group for row in rows})
    folds = min(FOLDS, len(groups))
    if folds < 2:
        return []
    found: list[Judged] = []
    for fold in range(folds):
        out = set(groups[fold::folds])
        profiles = _fitted(gpu, [row for row in rows if row.group not in out], start)
        found += judged(profiles, [row for row in rows if row.group in out])
    return found


def _fitted(gpu: str, rows: Sequence[Measurement], start: NetworkProfile) -> Profiles:
    hardware = GPUS[gpu]
    begin = start if hardware.reduces else replace(start, nvls=0.0)
    if hardware.is_rack:
        begin = replace(begin, nic=RACK_NIC)
    shared = fitted(points(rows), begin, NAMES)
    of_systems = set(NAMES) - OF_LINKS
    names = sorted({row.system for row in rows})
    systems = dict.fromkeys(names, shared)
    for name in names if len(names) > 1 else ():
        of_system = [row for row in rows if row.system == name]
        systems[name] = fitted(points(of_system), shared, of_systems)
    return Profiles(
        gpu=gpu,
        shared=shared,
        systems=systems,
        publications=tuple(sorted({_publication(row.source) for row in rows})),
        errors={},
    )


def _publication(source: str) -> str:
    """The repository and revision of a source, without the path of a file in it."""
    head, _, revision = source.partition("@")
    words = revision.split(" ")
    parts = head.removeprefix("github:").split("/")
    if not head.startswith("github:") or not words[0]:
        return source
    return f"github:{parts[0]}/{parts[1]}@{words[0]}"


def _medians(kind: str, all_judged: Sequence[Judged]) -> dict[str, float]:
    names = {"64 KiB to 16 MiB": "medium", "16 MiB and more": "large"}
    found: dict[str, float] = {}
    for size, name in names.items():
        errors = [
            each.error for each in all_judged if size_class(each.measurement.size_bytes) == size
        ]
        if errors:
            found[f"{kind}_{name}"] = median(errors)
    return found
