"""What DeepSpeed's stage 3 holds on real ranks is what the book says."""

from collections.abc import Iterator

from emulated_strategies import DEEPSPEED3_OPTIONS, strategy
from shared_ranks import SharedPools
from tiny_training import Case, trained_on_ranks

from zsim.memory import book
from zsim.strategy.precision import Precision
from zsim_torch.rank_result import state_peak


def cases(ranks: int) -> Iterator[Case]:
    for named in DEEPSPEED3_OPTIONS.values():
        for precision in (Precision.FP32, Precision.FP16):
            made = strategy(named, data=ranks, micro_batches=2, precision=precision, clip_norm=1.0)
            if made is not None:
                yield Case(made, steps=2, observe=True)


def test_live_storages_peak_at_the_book_to_the_byte(pool_of: SharedPools) -> None:
    found = list(cases(2))
    pool = pool_of(2)
    by_rank = trained_on_ranks(pool, found)
    for results in by_rank:
        for case, result in zip(found, results, strict=True):
            lives = result.observed["live_bytes_peak/state"]
            (program,) = case.schedule().programs
            assert lives == result.observed["booked_bytes_peak/state"], case
            assert lives <= state_peak(program, book(program, case.steps)), case
