"""Fit constants of kernels to measured times, one file for each kind of GPU.

The fit minimizes the mean of |log(predicted / measured)|. Constants of products are searched
together, the fraction of every other kind alone. To measure errors, a quarter of the shapes at a
time is held out and predicted by constants fitted to the rest; the written constants are fitted to
all rows. A GPU starts from the constants of its sibling, and keeps those without rows. If only one
direction of a kind has rows, the other keeps the sibling's ratio to it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from zlib import crc32

import numpy as np

from zsim.cluster.profile.host_launch import EAGER
from zsim.cluster.profile.kernels import ASSUMED, NAMES, FittedKernels, KernelProfile
from zsim.compute.fitted_model import fitted_s
from zsim.model.kernel import KernelKind
from zsim_lab.fit.least_squares import SCALES, Array, minimized
from zsim_lab.fit.network_profiles import publication
from zsim_lab.rows.gpu_kinds import ALIGNMENT, CUDNN, FLASH2
from zsim_lab.rows.kernel_rows import KernelRow, chip_of

START = KernelProfile(
    processors=108,
    fixed_s=4e-6,
    product=0.85,
    product_fill=150,
    tile_128x128=0.95,
    tile_128x64=0.8,
    tile_64x64=0.7,
    product_memory=0.8,
    attention_forward=0.35,
    attention_backward=0.3,
    **{  # type: ignore[arg-type]  # no kind is called launch, training or gpu
        f"{kind}_{way}": 0.6
        for kind in KernelKind
        if not kind.multiplies_matrices
        for way in ("forward", "backward")
    },
    launch=EAGER,
)
"""Start of a search: about the speed of NVIDIA's libraries. Host time is not fitted, since times of
single kernels do not show it."""

SIBLINGS = {
    "a100": "",
    "v100": "a100",
    "gh200": "a100",
    "h100": "gh200",
    "h100_hbm2e": "h100",
    "h100_hbm2e_2025": "h100_hbm2e",
    "h200": "h100",
    "h100_2026": "h200",
    "h100_2025": "h100",
    "h100_nemo_2025": "h100",
    "b200": "h100",
    "gb200": "b200",
    "gb300": "gb200",
}
"""GPU whose constants each GPU starts from, in the order of fitting: siblings are fitted before."""

VINTAGES: Mapping[str, str] = {
    "a100": "PyTorch 1.13 to 2.1, 2023",
    "h100": "PyTorch 1.13 to 2.1, 2023",
    "h100_hbm2e": "PyTorch nightlies, March 2024 to March 2025, at 500 W",
    "h100_hbm2e_2025": "PyTorch nightlies since September 2025",
    "h200": "PyTorch 2.11 with cuDNN 9.19, April 2026",
    "h100_2026": "that of h200, whose chip it is",
    "h100_2025": "PyTorch with FlashAttention-2, early 2025",
    "h100_nemo_2025": "NeMo containers 24.05 to 25.04: Transformer Engine 1.6 to 2.2, cuDNN 9",
    "gb200": "NeMo containers 25.09 to 26.04",
    "gb300": "NeMo container 25.11",
    "b200": "PyTorch 2.10 with Transformer Engine 2.11, May 2026",
}
"""Software and date of the runs and kernels of each profile; other profiles use a sibling's.
"""

OF_PRODUCTS = (
    "fixed_s",
    "product",
    "product_fill",
    "tile_128x128",
    "tile_128x64",
    "tile_64x64",
    "product_memory",
)
BOUNDS: Mapping[str, tuple[float, float]] = {
    "fixed_s": (1e-6, 6e-6),
    "product": (0.3, 1.0),
    "product_fill": (1.0, 1500.0),
    "tile_128x128": (0.3, 1.0),
    "tile_128x64": (0.2, 1.0),
    "tile_64x64": (0.1, 1.0),
    "product_memory": (0.3, 1.0),
}
"""Minimum and maximum of a constant; other fractions are between 1 % and twice the peak, since
caches save traffic. A fixed time above some microseconds is the benchmark's host, not the GPU."""

SHARE = (0.01, 2.0)
FEW = 20
"""Minimum rows of products for fitting more than their fraction of the peak."""

FINEST = 0.005
"""Scale of the last search: kernels alone are timed more exactly than collectives and steps."""

FOLDS = 4


def predicted_s(row: KernelRow, by: KernelProfile) -> float:
    """Return the predicted seconds of `row` with the constants."""
    return sum(fitted_s(kernel, chip_of(row.gpu).peaks, by) for kernel in row.kernels)


def error(row: KernelRow, by: KernelProfile) -> float:
    """Return the absolute error of the prediction, as a fraction of the measured time."""
    return abs(predicted_s(row, by) / row.seconds - 1)


def calibrated(rows: Sequence[KernelRow], *, report: Callable[[str], None]) -> list[FittedKernels]:
    """Return constants of every kind of GPU in `rows`, siblings first; `report` gets progress."""
    found: dict[str, FittedKernels] = {}
    for gpu, sibling in SIBLINGS.items():
        own = [row for row in rows if row.gpu == gpu]
        if not own and sibling not in found:
            continue
        report(f"{gpu}: {len(own)} times of kernels")
        start = found[sibling].constants if sibling in found else START
        start = replace(
            start,
            processors=chip_of(gpu).processors,
            flash2=FLASH2.get(gpu),
            cudnn=CUDNN.get(gpu),
            alignment=ALIGNMENT.get(gpu),
            gpu=gpu,
            vintage=VINTAGES.get(gpu, ""),
        )
        constants = fitted(own, start)
        errors = _medians("fitted", [(row, constants) for row in own])
        errors |= _medians("held_out", _held_out(own, start))
        counts = Counter(_kind(row) for row in own)
        kinds = [kind for kind in KernelKind if kind not in UNMEASURED]
        found[gpu] = FittedKernels(
            gpu=gpu,
            constants=constants,
            rows={str(kind): counts[kind] for kind in kinds},
            errors=errors,
            publications=tuple(sorted({publication(row.source) for row in own})),
            sibling=_taken_from(sibling, found) if any(not counts[k] for k in kinds) else "",
        )
    return list(found.values())


UNMEASURED = (KernelKind.SOFTMAX, KernelKind.GROUPED_MATMUL)
"""Kinds of kernels without published rows; grouped products have the constants of products."""


def _taken_from(sibling: str, found: Mapping[str, FittedKernels]) -> str:
    return sibling if sibling in found else ASSUMED


def fitted(rows: Sequence[KernelRow], start: KernelProfile) -> KernelProfile:
    """Return `start` with the constants that `rows` determine fitted to them."""
    products = [row for row in rows if _kind(row) == KernelKind.MATMUL]
    free = OF_PRODUCTS if len(products) >= FEW else ("product",)
    found = _searched(products, start, free) if products else start
    for kind in KernelKind:
        if kind in (KernelKind.MATMUL, *UNMEASURED):
            continue
        names = (f"{kind}_forward", f"{kind}_backward")
        ways = [
            [row for row in rows if _kind(row) == kind and row.kernels[0].backward is way]
            for way in (False, True)
        ]
        for name, own in zip(names, ways, strict=True):
            if own:
                found = _searched(own, found, (name,))
        if bool(ways[0]) != bool(ways[1]):
            known, other = names if ways[0] else names[::-1]
            ratio = getattr(found, known) / getattr(start, known)
            found = replace(found, **{other: getattr(start, other) * ratio})
    like = {f"softmax_{way}": getattr(found, f"norm_{way}") for way in ("forward", "backward")}
    return replace(found, **like)  # both read rows twice, and no table has softmax


def _kind(row: KernelRow) -> KernelKind:
    return row.kernels[0].kind


def _searched(
    rows: Sequence[KernelRow], start: KernelProfile, free: Sequence[str]
) -> KernelProfile:
    measured = np.log([row.seconds for row in rows])
    low, high = np.log([BOUNDS.get(name, SHARE) for name in free]).T

    def profile(constants: Array) -> KernelProfile:
        return replace(start, **dict(zip(free, np.exp(constants).tolist(), strict=True)))

    def errors(constants: Array) -> Array:
        by = profile(constants)
        return np.log([predicted_s(row, by) for row in rows]) - measured

    begin = np.log([getattr(start, name) for name in free])
    return profile(
        minimized(errors, begin, (low, high), weights=np.ones(len(rows)), scales=(*SCALES, FINEST))
    )


def _held_out(
    rows: Sequence[KernelRow], start: KernelProfile
) -> list[tuple[KernelRow, KernelProfile]]:
    found: list[tuple[KernelRow, KernelProfile]] = []
    folds = [[row for row in rows if _fold(row) == fold] for fold in range(FOLDS)]
    for fold, out in enumerate(folds):
        rest = [row for other, each in enumerate(folds) if other != fold for row in each]
        if out and rest:
            by = fitted(rest, start)
            found += [(row, by) for row in out]
    return found


def _fold(row: KernelRow) -> int:
    shapes = [(str(kernel.kind), kernel.shape) for kernel in row.kernels]
    return crc32(f"{row.file} {row.gpu} {shapes}".encode()) % FOLDS


def _medians(prefix: str, judged: Sequence[tuple[KernelRow, KernelProfile]]) -> dict[str, float]:
    errors: dict[str, list[float]] = {}
    for row, by in judged:
        errors.setdefault(f"{prefix}_{_kind(row)}", []).append(error(row, by))
    return {name: median(values) for name, values in sorted(errors.items())}


assert set(NAMES) >= {*OF_PRODUCTS, *BOUNDS}
