"""Slices copied out of reduced buckets, written by hand, on real ranks."""

from dataclasses import replace

import pytest
import torch
from reduced_by_hand import Plan, Reduced, all_by_slices, in_one_process
from shared_ranks import SharedPools

from zsim.dtype import DType
from zsim.memory import memory_ledger
from zsim.proof import check
from zsim_torch.rank_result import state_peak

RANKS = (2, 3, 5)
"""24 parameters, 12 in each bucket: cuts at a bucket's end, inside buckets, and with padding."""


def plans(ranks: int) -> list[Plan]:
    plain = Plan(ranks=ranks)
    return [
        replace(plain, micro_batches=1),
        replace(plain, poison=True),
        replace(plain, parameter=DType.BF16),
    ]


ATTEMPTS = 3
"""A thread of Gloo may hold a tensor for a moment longer than its collective; a leak stays."""


@pytest.mark.matrix(9)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_keep_slices_of_reduced_buckets_train_as_one_process_does(
    pool_of: SharedPools, ranks: int
) -> None:
    lives: list[set[float]] = []
    booked: list[set[float]] = []
    for _ in range(ATTEMPTS):
        pool = pool_of(ranks)
        by_rank = pool.run(all_by_slices, plans(ranks))
        lives, booked = [], []
        for index, plan in enumerate(plans(ranks)):
            wanted = in_one_process(plan)
            for parameters, _ in (found[index] for found in by_rank):
                assert set(parameters) == set(wanted)
                for name, value in wanted.items():
                    assert torch.allclose(parameters[name], value, rtol=0, atol=1e-6), (plan, name)
            (program,) = Reduced(plan).write().programs
            booked.append({state_peak(program, memory_ledger(program, plan.steps))})
            lives.append({found[index][1]["live_bytes_peak/state"] for found in by_rank})
        if lives == booked:
            return
    assert lives == booked


@pytest.mark.parametrize("ranks", RANKS)
def test_a_schedule_of_slices_passes_check(ranks: int) -> None:
    for plan in plans(ranks):
        assert check(Reduced(plan).write()) == ()
