"""Tensor and pipeline axes on real ranks, with data ranks around them, train as one process does.

Sums over ranks of the tensor axis are in another order than those of one process, so values differ
by roundings; stages of a pipeline do what one process does, in its order, and to its bits.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from tiny_training import BOUND, distance
from trained_axes import (
    CUT,
    DEEP_LLAMA,
    FULL,
    KEPT,
    MEGATRON,
    NANOTRON,
    PARTITIONED,
    PLAIN,
    SMALL_GPT,
    SMALL_LLAMA,
    TIED_GPT,
    WIDE_GPT,
    AxesCase,
    RankResult,
    by_plain_loop,
    by_rank,
    by_ranks,
    on,
    whole,
)

from zsim.model.architecture import Architecture
from zsim.proof import against_trace as refinement
from zsim.runtimes.nanotron.options import Nanotron
from zsim.strategy.precision import Precision
from zsim_torch.rank_result import merged
from zsim_torch.supervise.ranks import RankPool

TWO_RANKS = {
    "stage 3, tensor 2": AxesCase(
        SMALL_LLAMA, on(PLAIN, tensor=2, stage=3, bucket_elements=200, clip_norm=0.1)
    ),
    "stage 1, tensor 2, tied, checkpoints": AxesCase(
        TIED_GPT, on(PLAIN, tensor=2, stage=1).but(FULL)
    ),
    "Megatron-LM, tensor 2": AxesCase(SMALL_GPT, on(MEGATRON, tensor=2), witness=True),
    "nanotron, tensor 2, tokens cut and kept whole": AxesCase(
        SMALL_GPT, on(NANOTRON, tensor=2, stage=1, emulate=KEPT, clip_norm=0.1), poison=True
    ),
    "nanotron, 2 stages": AxesCase(SMALL_GPT, on(NANOTRON, pipeline=2), witness=True),
}
FOUR_RANKS = {
    "nanotron, 2 stages, 2 replicas": AxesCase(
        SMALL_LLAMA, on(NANOTRON, data=2, pipeline=2, stage=1, clip_norm=0.1), poison=True
    ),
    "nanotron, 2 stages, tensor 2, tokens cut": AxesCase(
        SMALL_LLAMA, on(NANOTRON, tensor=2, pipeline=2, emulate=CUT, clip_norm=0.1), witness=True
    ),
    "nanotron, 4 stages": AxesCase(WIDE_GPT, on(NANOTRON, pipeline=4)),
    "stage 3, tensor 2, 2 replicas": AxesCase(SMALL_GPT, on(PLAIN, data=2, tensor=2, stage=3)),
}
SHAPES: tuple[Architecture, ...] = (TIED_GPT, SMALL_GPT, SMALL_LLAMA, SMALL_GPT)
"""For the stages, one each."""
MORE = {
    2: {
        f"stage {stage}, tensor 2, {checkpoints}": AxesCase(
            shape, on(PLAIN, tensor=2, stage=stage, clip_norm=0.1).but(changes), poison=True
        )
        for stage, shape in enumerate(SHAPES)
        for checkpoints, changes in {"none": {}, "full": FULL, "partitioned": PARTITIONED}.items()
    }
    | {
        f"nanotron, tensor 2, {mode}, stage {stage}, {checkpoints}": AxesCase(
            shape, on(NANOTRON, tensor=2, stage=stage, emulate=mode).but(changes), witness=True
        )
        for mode in (Nanotron(), CUT, KEPT)
        for stage, shape in enumerate(SHAPES[1:3])
        for checkpoints, changes in {"none": {}, "full": FULL}.items()
    },
    4: {
        f"nanotron, {data} x {tensor} x {pipeline}, {mode}, stage {stage}, {checkpoints}": AxesCase(
            DEEP_LLAMA,
            on(NANOTRON, data, tensor, pipeline, stage=stage, emulate=mode, clip_norm=0.1).but(
                changes
            ),
            poison=stage == 0,
            witness=stage == 1,
        )
        for data, tensor, pipeline in ((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4))
        for mode in (Nanotron(), CUT, KEPT)
        for stage in (0, 1)
        for checkpoints, changes in {"none": {}, "full": FULL}.items()
        if tensor != 4  # two heads of keys
    }
    | {
        "Megatron-LM, tensor 4": AxesCase(SMALL_GPT, on(MEGATRON, tensor=4), poison=True),
        "Megatron-LM, tensor 2, 2 replicas": AxesCase(
            SMALL_GPT, on(MEGATRON, data=2, tensor=2), witness=True
        ),
    },
}


def results_of(ranks: int, cases: Mapping[str, AxesCase]) -> dict[str, list[RankResult]]:
    """What each case leaves on each rank, trained in one pool."""
    with RankPool(ranks) as pool:
        by_number = pool.run(by_ranks, list(cases.values()))
    return dict(zip(cases, map(list, zip(*by_number, strict=True)), strict=True))


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, TWO_RANKS),
        (4, FOUR_RANKS),
        *(pytest.param(ranks, more, marks=pytest.mark.long) for ranks, more in MORE.items()),
    ],
)
def test_axes_train_as_one_process_does_and_their_run_is_their_schedule(
    ranks: int, cases: Mapping[str, AxesCase]
) -> None:
    for name, results in results_of(ranks, cases).items():
        case = cases[name]
        before, after, losses = by_plain_loop(case)
        bound = BOUND[case.strategy.train.precision]
        assert {result.losses for result in results} == {results[0].losses}, name
        assert results[0].losses == pytest.approx(losses, rel=10 * bound), name
        assert distance(whole(case, results), after, before) <= bound, name
        if case.witness:
            trace = merged([result.trace for result in results])
            assert refinement.examine(case.job().schedule, trace) == [], name


def test_stages_train_to_the_bits_of_one_rank() -> None:
    formats = {
        str(precision): AxesCase(
            SMALL_LLAMA, on(NANOTRON.but({"train.precision": precision}), pipeline=2)
        )
        for precision in (Precision.FP32, Precision.BF16)
    }
    for name, results in results_of(2, formats).items():
        case = formats[name]
        alone = by_rank(replace(case, strategy=on(case.strategy)))
        assert results[0].losses == alone.losses, name
        found = whole(case, results)
        for parameter, value in whole(case, [alone]).items():
            assert torch.equal(found[parameter], value), (name, parameter)
