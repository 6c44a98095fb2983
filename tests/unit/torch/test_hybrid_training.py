"""Sharded in a group and replicated across, or with secondary shards: trains as one process."""

import pytest
from shared_ranks import SharedPools
from tiny_training import BOUND, Case, by_plain_loop, distance, trained_on_ranks

from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

ADAM = Adam(learning_rate=0.01, epsilon=1e-5)
CASES = {
    f"stage {stage}, {data} x {replicate}, secondary {secondary}, once {once}": Case(
        Strategy(
            parallel=Parallel(data=data, replicate=replicate),
            zero=Zero(stage=stage, secondary=secondary, reduce_once=once, bucket_elements=60),
            train=Train(gradient_accumulation_steps=2, optimizer=ADAM, clip_norm=0.1),
        ),
        steps=3,
    )
    for stage, data, replicate, secondary, once in (
        (0, 2, 2, None, False),
        (1, 2, 2, None, False),
        (2, 2, 2, None, False),
        (2, 2, 2, None, True),
        (3, 2, 2, None, False),
        (3, 1, 4, None, False),
        (3, 4, 1, 2, False),
        (3, 4, 1, 4, True),
        (3, 2, 2, 2, False),
    )
}


@pytest.mark.matrix(9)
@pytest.mark.parametrize("name", CASES)
def test_hybrid_stages_train_as_one_process_does(pool_of: SharedPools, name: str) -> None:
    case = CASES[name]
    result = trained_on_ranks(pool_of(4), [case])[0][0]
    before, after, losses = by_plain_loop(case)
    assert distance(result.parameters, after, before) <= BOUND[Precision.FP32]
    assert result.losses == pytest.approx(losses, rel=1e-3)
    assert case.strategy.ranks == 4
