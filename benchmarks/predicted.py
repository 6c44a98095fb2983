"""Steps of the ranks at hand as predicted, beside what they really take.

    python -m benchmarks.predicted [NODE.toml]

The machine is measured first, unless the file that `zsim measure` wrote is given. Then 12 trainings
run on two ranks: ZeRO stages 0 to 3 of three sizes, none of which the measurement has run. Targets:
each median step within 15 %, and stages of a size that differ by more than 10 % in the predicted
order. The machine must have nothing else to do.
"""

import sys
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import zsim
from zsim.api.real_comparison import RealComparisonResult, compare_with_real

RANKS = 2
STEPS = 22
STAGES = (0, 1, 2, 3)
ERROR = 0.15
APART = 0.10
"""Stages whose medians differ by more have a place before or behind each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model of the table."""

    name: str
    layers: int
    hidden_size: int
    sequence_length: int


SIZES = (
    Size(name="small", layers=2, hidden_size=128, sequence_length=64),
    Size(name="middle", layers=4, hidden_size=256, sequence_length=128),
    Size(name="large", layers=6, hidden_size=384, sequence_length=128),
)


def tables(size: Size, stage: int) -> dict[str, object]:
    """Return the scenario of a row."""
    return {
        "title": f"{size.name}, stage {stage}",
        "model": {
            "layers": size.layers,
            "hidden_size": size.hidden_size,
            "attention_heads": 8,
            "sequence_length": size.sequence_length,
            "vocab_size": 256,
        },
        "cluster": {"topology": "dgx_a100_infiniband"},
        "parallel": {"data": RANKS},
        "zero": {"stage": stage, "bucket_elements": 1_000_000},
        "train": {
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "precision": "fp32",
            "optimizer": "adam",
            "learning_rate": 1e-3,
        },
    }


def right_order(found: dict[int, RealComparisonResult]) -> tuple[int, int]:
    """Return how many pairs of stages that are apart are predicted in order, and how many are."""
    right = apart = 0
    for one, other in combinations(found.values(), 2):
        first, second = one.step, other.step
        if abs(first.median_s / second.median_s - 1) <= APART:
            continue
        apart += 1
        right += (first.median_s < second.median_s) == (first.predicted_s < second.predicted_s)
    return right, apart


def main() -> None:
    """Print the table."""
    begin = time.perf_counter()
    with TemporaryDirectory() as folder:
        node = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "node.toml"
        if len(sys.argv) < 2:
            measured = zsim.measure(ranks=RANKS)
            measured.write(node)
            print(f"{measured.node.source}; measured in {time.perf_counter() - begin:.0f} s")
        print(f"{'':<18}{'predicted':>12}{'lowest':>12}{'median':>12}{'error':>9}")
        errors: list[float] = []
        right = apart = 0
        for size in SIZES:
            found: dict[int, RealComparisonResult] = {}
            for stage in STAGES:
                found[stage] = result = compare_with_real(
                    tables(size, stage), ranks=RANKS, node=node, steps=STEPS
                )
                step = result.step
                error = step.error or 0.0
                errors.append(abs(error))
                times = "".join(
                    f"{each * 1e3:>9.2f} ms"
                    for each in (step.predicted_s, step.lowest_s, step.median_s)
                )
                print(f"{f'{size.name}, stage {stage}':<18}{times}{error:>+9.1%}", flush=True)
            ordered, differ = right_order(found)
            right, apart = right + ordered, apart + differ
    within = sum(error <= ERROR for error in errors)
    print(f"within {ERROR:.0%}: {within} of {len(errors)}; largest {max(errors):.1%}")
    print(f"pairs of stages more than {APART:.0%} apart, in order: {right} of {apart}")
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
