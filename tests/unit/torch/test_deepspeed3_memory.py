"""What DeepSpeed's stage 3 holds on real ranks is what the book says."""

from itertools import product

import pytest
from emulated_strategies import DEEPSPEED3_OPTIONS, strategy
from shared_ranks import SharedPools
from tiny_training import Case, trained_on_ranks

from zsim.memory import memory_ledger
from zsim.strategy.precision import Precision
from zsim_torch.rank_result import state_peak

CASES = [*product(DEEPSPEED3_OPTIONS, (Precision.FP32, Precision.FP16))]


@pytest.mark.matrix(12)
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_live_storages_peak_at_the_book_to_the_byte(
    pool_of: SharedPools, name: str, precision: Precision
) -> None:
    made = strategy(
        DEEPSPEED3_OPTIONS[name], data=2, micro_batches=2, precision=precision, clip_norm=1.0
    )
    assert made is not None
    case = Case(made, steps=2, observe=True)
    (program,) = case.schedule().programs
    for (result,) in trained_on_ranks(pool_of(2), [case]):
        lives = result.observed["live_bytes_peak/state"]
        assert lives == result.observed["booked_bytes_peak/state"]
        assert lives <= state_peak(program, memory_ledger(program, case.steps))
