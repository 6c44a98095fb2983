"""The fits find again the constants of the profiles that ship, from rows that these would give.

Rows come from formulas in tests/support, which share no code with what is fitted.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import collective_formula
import kernel_formula
import numpy as np
import pytest

from zsim.cluster.profile import in_training
from zsim.cluster.profile import kernels as kernel_profile
from zsim.cluster.profile.in_training import InTraining
from zsim.dtype import DType
from zsim.files.installed import fitted_kernels, network_profiles
from zsim.model.kernel import Kernel, KernelKind, flash_attention, matmul, streaming
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim_lab.fit import kernel_fit, training_fit
from zsim_lab.fit.constants import START
from zsim_lab.fit.network_fit import fitted
from zsim_lab.fit.training_fit import Observed
from zsim_lab.rows.collective_rows import Measurement
from zsim_lab.rows.hardware import GPUS
from zsim_lab.rows.kernel_rows import CHIPS, KernelRow

LINKS = Bandwidths(
    gpu=int(collective_formula.LINK),
    node=int(collective_formula.NICS),
    pair=int(collective_formula.NICS) // 8,
)
RANKS = (2, 3, 4, 5, 8, 16, 32)
SIZES = [2**power for power in range(10, 36)]
NODES_OF_EIGHT = ["a100", "b200", "h100", "h200", "v100"]


def speaks_of(name: str, by: dict[str, float], times: Callable[[dict[str, float]], float]) -> bool:
    """Return whether the rows that `times` sums up change with a constant that changes by 3 %."""
    return any(
        times(by | {name: by[name] * factor}) != pytest.approx(times(by), rel=1e-9)
        for factor in (0.97, 1.03)
    )


def some_speak_of(
    name: str, by: dict[str, float], times: Callable[[dict[str, float]], list[float]]
) -> bool:
    """Return whether, either way, ten rows change by a thousandth with a change of 3 %.

    A protocol that is the fastest in fewer has two constants that these rows cannot tell apart: on
    H200 LL128 is the fastest in one row of 1,274, on B200 in two.
    """
    before = times(by)
    return all(
        sum(
            abs(new / old - 1) > 1e-3
            for new, old in zip(times(by | {name: by[name] * factor}), before, strict=True)
        )
        >= 10
        for factor in (0.97, 1.03)
    )


@pytest.mark.one_commit_in(9)
@pytest.mark.parametrize(
    "gpu",
    [gpu if gpu == "a100" else pytest.param(gpu, marks=pytest.mark.long) for gpu in NODES_OF_EIGHT],
)
def test_constants_of_a_network_are_found_again(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The price keeps constants at their start of which rows say little: of these they say it all.
    monkeypatch.setattr("zsim_lab.fit.network_fit.PRICE", 1e-4)
    shipped = network_profiles()[gpu].shared
    by = {name: shipped[name] for name in START.numbers}
    asked = [(kind, ranks, size) for kind in Collective for ranks in RANKS for size in SIZES]

    def seconds(constants: dict[str, float]) -> list[float]:
        return [collective_formula.seconds(constants, str(kind), *row) for kind, *row in asked]

    rows = [
        Measurement(
            file="table",
            row=line,
            gpu=gpu,
            system="one",
            collective=kind,
            shape=GroupShape(ranks=ranks, nodes=-(-ranks // collective_formula.NODE)),
            size_bytes=size,
            seconds=taken,
            links=LINKS,
            source="nobody",
        )
        for line, ((kind, ranks, size), taken) in enumerate(zip(asked, seconds(by), strict=True))
    ]
    found = fitted(rows, START if GPUS[gpu].reduces else START.changed(nvls=0.0)).shared
    found = fitted(rows, found).shared  # a long valley: the search ends before its floor
    told = [name for name in START.numbers if some_speak_of(name, by, seconds)]
    assert len(told) >= 25, told
    for name in told:
        assert found[name] == pytest.approx(by[name], rel=0.01), name
    again = {name: found[name] for name in START.numbers}
    assert seconds(again) == pytest.approx(seconds(by), rel=0.01)


OF_BYTES = [kind for kind in KernelKind if not kind.multiplies_matrices]


def timed_kernels(gpu: str, by: dict[str, float]) -> Iterator[tuple[Kernel, float]]:
    peaks = CHIPS[gpu].peaks
    for m in (64, 192, 512, 1024, 2048, 5000):
        for n in (64, 320, 1024, 4096):
            for k in (64, 256, 1024, 8192):
                yield (
                    matmul(m, n, k, DType.BF16),
                    kernel_formula.product(m, n, k, by, flops=peaks.flops, memory=peaks.bytes),
                )
    for backward in (False, True):
        way = "backward" if backward else "forward"
        for length in (512, 2048, 8192):
            yield (
                flash_attention((1, 16, 16, length, length, 64), DType.BF16, backward=backward),
                kernel_formula.attention(16, length, by, backward=backward, flops=peaks.flops),
            )
            for kind in OF_BYTES:
                yield (
                    streaming(kind, (length, 4096), DType.BF16, streams=2, backward=backward),
                    kernel_formula.moving(
                        2 * 2 * length * 4096, f"{kind}_{way}", by, memory=peaks.bytes
                    ),
                )


@pytest.mark.matrix(9)
@pytest.mark.parametrize("gpu", ["a100", "gh200", "h100"])
def test_constants_of_kernels_are_found_again(gpu: str) -> None:
    shipped = fitted_kernels()[gpu].constants
    by = {name: getattr(shipped, name) for name in kernel_profile.NAMES}
    rows = [
        KernelRow(
            file="t", row=2, gpu=gpu, name="k", kernels=(kernel,), seconds=taken, source="nobody"
        )
        for kernel, taken in timed_kernels(gpu, by)
    ]
    start = replace(kernel_fit.START, processors=shipped.processors)
    found = kernel_fit.fitted(rows, start)

    def seconds(constants: dict[str, float]) -> float:
        return sum(taken for _, taken in timed_kernels(gpu, constants))

    told = [name for name in kernel_profile.NAMES if speaks_of(name, by, seconds)]
    assert len(told) >= 22, told
    for name in told:
        assert getattr(found, name) == pytest.approx(by[name], rel=0.01), name


@pytest.mark.parametrize("gpu", ["a100", "h100", "h100_hbm2e"])
def test_constants_of_training_are_found_again(gpu: str) -> None:
    shipped = fitted_kernels()[gpu].constants.training
    runs: list[Observed] = []
    for parts in np.random.default_rng(0).uniform(1, 8, (2 * training_fit.MANY, 5)).tolist():
        alone = dict(zip(in_training.SHARES, parts, strict=True))
        work = sum(taken / getattr(shipped, name) for name, taken in alone.items())
        runs.append(Observed(file="t", seconds=work + 0.5, alone_s=alone, rest_s=0.5))
    found = training_fit.fitted(runs, InTraining())
    for name in in_training.SHARES:
        assert found.constant(name) == pytest.approx(shipped.constant(name), rel=0.01), name
