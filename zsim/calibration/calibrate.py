"""From measurements to profiles: one fit for each kind of GPU, one for what each system changes.

To see how far the constants carry, each group of rows - a file, hardware, collective and size of
group - is held out once: everything is fitted again without it, and it is predicted. The constants
that are written are fitted to all rows.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median

from zsim.calibration.fit import OF_LINKS, START, fitted, points
from zsim.calibration.hardware import GPUS
from zsim.calibration.measured import SCALING, Measurement
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
    used = [row for row in rows if row.file != SCALING]
    for gpu in sorted({row.gpu for row in used}):
        of_gpu = [row for row in used if row.gpu == gpu]
        report(f"{gpu}: {len(of_gpu)} rows")
        profiles = _fitted(gpu, of_gpu)
        errors = _medians("fitted", judged(profiles, of_gpu))
        errors |= _medians("held_out", _held_out(gpu, of_gpu))
        found.append(replace(profiles, errors=errors))
    return found


def _held_out(gpu: str, rows: Sequence[Measurement]) -> list[Judged]:
    groups = sorted({row.group for row in rows})
    folds = min(FOLDS, len(groups))
    if folds < 2:
        return []
    found: list[Judged] = []
    for fold in range(folds):
        out = set(groups[fold::folds])
        profiles = _fitted(gpu, [row for row in rows if row.group not in out])
        found += judged(profiles, [row for row in rows if row.group in out])
    return found


def _fitted(gpu: str, rows: Sequence[Measurement]) -> Profiles:
    start = START if GPUS[gpu].reduces else replace(START, nvls=0.0)
    shared = fitted(points(rows), start, NAMES)
    of_systems = set(NAMES) - OF_LINKS
    systems: dict[str, NetworkProfile] = {}
    for name in sorted({row.system for row in rows}):
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
