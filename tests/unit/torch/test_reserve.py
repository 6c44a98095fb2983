"""Memory of freed buffers serves others, and neither bits nor what lives tell."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared_ranks import SharedPools
from tiny_training import Case, Parameters, by_schedule

from zsim.proof import against_trace as refinement
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_torch.execute import reserve
from zsim_torch.execute.reserve import LARGE_BYTES, Reserve
from zsim_torch.rank_result import merged
from zsim_torch.supervise.ranks import RankPool

SIZES = st.sampled_from([1, LARGE_BYTES, 2 * LARGE_BYTES, 3 * LARGE_BYTES])


@given(st.lists(st.tuples(SIZES, st.integers(0, 5))))
def test_nothing_that_is_held_is_given_away_and_no_more_is_kept_than_was_needed(
    steps: list[tuple[int, int]],
) -> None:
    """Each step takes so many bytes, and drops what was taken so many steps before."""
    store, peak = Reserve(), 0
    held: dict[int, torch.Tensor] = {}
    for number, (size, age) in enumerate(steps):
        made = store.take(size, torch.uint8)
        view = made[: max(1, size // 2)]  # a view alone keeps it
        view[0] = view[-1] = number
        held[number] = view
        del made, view
        bytes_held = [each.untyped_storage().nbytes() for each in held.values()]
        peak = max(peak, sum(each for each in bytes_held if each >= LARGE_BYTES))
        assert store.bytes <= peak
        assert all(each[0] == each[-1] == other for other, each in held.items())
        held.pop(number - age, None)


def test_a_block_serves_again_once_nobody_has_a_tensor_on_it() -> None:
    store = Reserve()
    first = store.take(LARGE_BYTES, torch.float32)
    address = first.data_ptr()
    assert address % 64 == 0  # as memory of torch: kernels round alike
    view = first[3:]
    del first
    assert store.take(LARGE_BYTES, torch.float32).data_ptr() != address
    del view
    again = store.take(2 * LARGE_BYTES, torch.bfloat16)
    assert again.data_ptr() == address
    assert again.shape == (2 * LARGE_BYTES,)
    assert again.is_contiguous()


def cases(ranks: int) -> list[Case]:
    return [
        Case(
            Strategy(
                parallel=Parallel(data=ranks),
                zero=Zero(stage=stage, bucket_elements=60),
                activations=Activations(checkpointing=checkpointing),
                train=Train(gradient_accumulation_steps=2, optimizer=Adam(), clip_norm=1.0),
            ),
            steps=3,
            poison=poison,
        )
        for stage, checkpointing, poison in (
            (0, Checkpointing.NONE, False),
            (1, Checkpointing.FULL, True),
            (2, Checkpointing.NONE, True),
            (3, Checkpointing.FULL, True),
        )
    ]


def trained(found: list[Case], large_bytes: int) -> list[tuple[Parameters, tuple[float, ...], int]]:
    """Train on this rank; buffers of so many bytes serve again. Tells bytes that did, too."""
    taken: list[Reserve] = []
    results: list[tuple[Parameters, tuple[float, ...], int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reserve, "LARGE_BYTES", large_bytes)
        take = Reserve.take

        def noted(store: Reserve, elements: int, dtype: torch.dtype) -> torch.Tensor:
            taken.append(store)
            return take(store, elements, dtype)

        patch.setattr(Reserve, "take", noted)
        for case in found:
            taken.clear()
            made = by_schedule(case)
            results.append((made.parameters, made.losses, taken[-1].bytes))
    return results


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


@pytest.mark.one_commit_in(9)
def test_memory_that_serves_again_changes_no_bit(pool: RankPool) -> None:
    plain = pool.run(trained, cases(2), LARGE_BYTES)
    again = pool.run(trained, cases(2), 1)
    for one, other in zip(plain, again, strict=True):
        for (left, losses, none), (right, same, some) in zip(one, other, strict=True):
            assert none == 0 < some
            assert losses == same
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], value) for name, value in right.items())


@pytest.mark.one_commit_in(6)
def test_what_is_seen_to_live_does_not_count_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(cases(1)[-1], observe=True, poison=False)
    plain = by_schedule(case).observed
    monkeypatch.setattr(reserve, "LARGE_BYTES", 1)
    again = by_schedule(case).observed
    assert again["live_bytes_peak/state"] == plain["live_bytes_peak/state"]
    assert again["booked_bytes_peak/state"] == plain["booked_bytes_peak/state"]


def witnessed(case: Case) -> Trace:
    """Train on this rank under witnesses, with buffers of any size in memory that serves again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reserve, "LARGE_BYTES", 1)
        return by_schedule(case).trace


@pytest.mark.matrix(12)
@pytest.mark.parametrize("case", cases(2), ids=lambda case: f"stage {case.strategy.zero.stage}")
def test_witnesses_see_memory_that_serves_again_as_taken(case: Case, pool: RankPool) -> None:
    """It is taken by no operator of torch."""
    told = merged(pool.run(witnessed, replace(case, poison=False, witness=True)))
    assert refinement.examine(case.schedule(), told) == []
