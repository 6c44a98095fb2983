"""Real training by any drawn strategy ends where a plain loop does, in the booked memory."""

import pytest
from drawn import small_buckets, zero_strategies
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st
from shared_ranks import SharedPools
from tiny_training import (
    BOUND,
    Case,
    Result,
    by_plain_loop,
    by_schedule,
    distance,
    trained_on_ranks,
)

from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_torch.supervise.ranks import RankPool

RANKS = 3


def case_of(drawn: Strategy, data: int, optimizer: SGD | Adam) -> Case:
    """`drawn` in a format that can be compared to 10 digits."""
    strategy = small_buckets(drawn).but(
        {
            "parallel.data": data,
            "parallel.tensor": 1,
            "train.precision": Precision.FP64,
            "train.optimizer": optimizer,
        }
    )
    return Case(strategy, steps=2, observe=True, poison=True)


OPTIMIZERS = st.sampled_from([SGD(learning_rate=0.1), Adam(learning_rate=0.01, epsilon=1e-5)])


def holds(case: Case, result: Result) -> None:
    before, after, _ = by_plain_loop(case)
    assert distance(result.parameters, after, before) <= BOUND[Precision.FP64]
    observed = result.observed
    assert observed["live_bytes_peak/state"] == observed["booked_bytes_peak/state"]


AT_ONCE = zero_strategies().filter(lambda drawn: not drawn.offload.delayed_update)
"""Delayed updates have a plain loop of their own (test_delayed_training)."""


@pytest.mark.one_commit_in(6)
@examples(25)
@given(AT_ONCE, OPTIMIZERS)
def test_one_rank_trains_as_a_plain_loop_in_the_booked_memory(
    drawn: Strategy, optimizer: SGD | Adam
) -> None:
    case = case_of(drawn, 1, optimizer)
    holds(case, by_schedule(case))


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(RANKS)


@pytest.mark.one_commit_in(24)
@examples(8)
@given(drawn=AT_ONCE, optimizer=OPTIMIZERS)
def test_three_ranks_train_as_a_plain_loop_in_the_booked_memory(
    pool: RankPool, drawn: Strategy, optimizer: SGD | Adam
) -> None:
    case = case_of(drawn, RANKS, optimizer)
    for (result,) in trained_on_ranks(pool, [case]):
        holds(case, result)
