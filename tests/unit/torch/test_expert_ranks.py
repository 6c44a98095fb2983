"""Experts on real ranks train as one process does that holds all of them.

Sums over the experts of a token, and over ranks, are in another order than those of one process.
"""

from dataclasses import replace

import pytest
from shared_ranks import SharedPools
from tiny_training import BOUND, distance
from trained_axes import FULL, MEGATRON, PLAIN, by_plain_loop
from trained_experts import FEW, MIXTURES, ExpertCase, mixing, over, trained_experts, whole_of

from zsim.strategy.precision import Precision
from zsim_torch.supervise.ranks import RankPool

TWO_RANKS = {
    **{
        f"stage 1, {name}": ExpertCase(mixing(experts), over(2, 2, stage=1))
        for name, experts in MIXTURES.items()
    },
    "stage 0, recomputed, poisoned": ExpertCase(
        mixing(FEW), over(2, 2, stage=0).but(FULL), poison=True
    ),
    "stage 3, clipped": ExpertCase(
        mixing(FEW), over(2, 2, stage=3, bucket_elements=200).but({"train.clip_norm": 0.1})
    ),
    "Megatron-LM": ExpertCase(mixing(FEW), over(2, 2, MEGATRON)),
    "bf16": ExpertCase(
        mixing(FEW), over(2, 2, PLAIN.but({"train.precision": Precision.BF16}), stage=2)
    ),
}
FOUR_RANKS = {
    "two experts ranks of two, stage 2": ExpertCase(
        mixing(FEW), over(2, 4, stage=2).but({"train.clip_norm": 0.1}), poison=True
    ),
    "an expert on each, stage 3": ExpertCase(mixing(FEW), over(4, 4, stage=3)),
    "two experts on each, Megatron-LM": ExpertCase(
        mixing(MIXTURES["sigmoids in groups, shared experts"]), over(4, 4, MEGATRON)
    ),
}
ONE_RANK = ExpertCase(mixing(MIXTURES["sigmoids in groups, shared experts"]), over(1, 1))


def assert_as_one_process(pool: RankPool, case: ExpertCase) -> None:
    """Train a case on ranks, and compare it with a plain loop if the format is as wide."""
    results = trained_experts(pool, case)
    assert {result.losses for result in results} == {results[0].losses}
    bound = BOUND.get(case.strategy.train.precision)
    if bound is not None:
        before, after, losses = by_plain_loop(case)
        assert results[0].losses == pytest.approx(losses, rel=10 * bound)
        assert distance(whole_of(case, results), after, before) <= bound


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_expert_ranks_train_as_one_process(pool_of: SharedPools, name: str) -> None:
    assert_as_one_process(pool_of(2), TWO_RANKS[name])


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_with_experts_train_as_one_process(pool_of: SharedPools, name: str) -> None:
    assert_as_one_process(pool_of(4), FOUR_RANKS[name])


def test_a_rank_with_all_experts_trains_as_a_plain_loop(pool_of: SharedPools) -> None:
    assert_as_one_process(pool_of(1), replace(ONE_RANK, observe=False))
