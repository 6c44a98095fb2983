"""Work of a proof grows with the layers of the model, also where their states are in files."""

import numpy as np
import pytest
from executed_lines import lines_run
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import check
from zsim.proof.execution.cover import MIXED, Cover
from zsim.runtimes.registry import make_schedule
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

NVME = MemoryTier.NVME
PIECES = 5
parts = st.lists(
    st.dictionaries(st.integers(0, PIECES), st.integers(0, 2**64 - 1), max_size=PIECES),
    max_size=6,
)


def work(layers: int) -> int:
    """Return the lines that the proof of an fp16 step with states in files takes."""
    shape = GPT(layers=layers, hidden_size=4, attention_heads=1, sequence_length=2, vocab_size=5)
    strategy = Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=3, bucket_elements=1),
        offload=Offload(optimizer=NVME, gradients=NVME, sub_group_elements=1),
        train=Train(precision=Precision.FP16),
    )
    model = gpt(shape, micro_batch_size=1, precision=Precision.FP16)
    schedule = make_schedule(model, strategy)
    assert check(schedule, model) == ()
    return lines_run(lambda: check(schedule, model))


@pytest.mark.one_commit_in(24)
def test_each_further_layer_in_files_costs_as_much_as_the_one_before() -> None:
    none, two, four = (work(layers) for layers in (1, 3, 7))
    assert four - two <= 2.05 * (two - none)


@given(parts)
def test_what_verdicts_cover_together_is_the_union_of_what_each_covers(
    added: list[dict[int, int]],
) -> None:
    """Number 0 is of no piece, and is dropped."""
    covered = Cover(PIECES).with_part(np.zeros((1, 0), np.int64), np.zeros((1, 1, 0), np.uint64))
    wanted = np.zeros(PIECES, np.uint64)
    for part in added:
        pieces = np.array([[each if each else MIXED for each in part]], np.int64)
        words = np.array([[list(part.values())]], np.uint64).reshape(1, 1, len(part))
        covered |= Cover(PIECES).with_part(pieces, words)
        for piece, bits in part.items():
            if piece:
                wanted[piece - 1] |= np.uint64(bits)
    assert covered.whole.shape == (1, 1, PIECES)
    assert (covered.whole.reshape(-1) == wanted).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_set_of_all_pieces_is_joined_rank_by_rank(rank: int) -> None:
    every = np.array([[[1, 0, 4], [2, 0, 0]]], np.uint64)
    alone = Cover(3).with_part(np.array([[2], [0]]), np.array([[[8], [8]]], np.uint64))
    both = (alone | Cover(3).with_part(None, every)).whole
    assert both[0, rank].tolist() == [[1, 8, 4], [2, 0, 0]][rank]
