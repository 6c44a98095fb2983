from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim_torch.text import VOCABULARY, BatchPlace, Text, TextError, read_text

CONTENT = bytes(range(256)) * 3


def batch(
    text: Text, step: int, micro_batch: int, coordinate: int, ranks: int, size: int, seed: int = 0
) -> torch.Tensor:
    which = BatchPlace(
        step=step, micro_batch=micro_batch, coordinate=coordinate, ranks=ranks, size=size
    )
    return text.batch(which, seed=seed)


@pytest.mark.one_commit_in(6)
@given(
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    size=st.integers(1, 3),
    step=st.integers(0, 100),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=50)
def test_ranks_together_read_what_one_process_reads(
    ranks: int, micro_batches: int, size: int, step: int, seed: int
) -> None:
    text = Text(CONTENT, 7)
    shared = [
        batch(text, step, index, rank, ranks, size, seed)
        for index in range(micro_batches)
        for rank in range(ranks)
    ]
    wide = [batch(text, step, index, 0, 1, ranks * size, seed) for index in range(micro_batches)]
    many = [batch(text, step, index, 0, 1, size, seed) for index in range(ranks * micro_batches)]
    assert torch.equal(torch.cat(shared), torch.cat(wide))
    assert torch.equal(torch.cat(shared), torch.cat(many))


def test_a_batch_is_cut_from_the_text_as_bytes() -> None:
    tokens = batch(Text(CONTENT, 7), 0, 0, 0, 1, 5)
    assert (tokens.shape, tokens.dtype) == ((5, 8), torch.int64)
    for row in tokens.tolist():
        assert bytes(row) in CONTENT


def test_ranks_micro_batches_steps_and_seeds_read_different_text() -> None:
    text = Text(CONTENT, 7)
    read = [
        batch(text, 0, 0, 0, 2, 4),
        batch(text, 0, 0, 1, 2, 4),
        batch(text, 0, 1, 0, 2, 4),
        batch(text, 1, 0, 0, 2, 4),
        batch(text, 0, 0, 0, 2, 4, seed=1),
    ]
    assert not any(torch.equal(one, other) for one in read for other in read if one is not other)


def test_a_text_of_one_sequence_is_enough() -> None:
    assert batch(Text(b"abc", 2), 0, 0, 0, 1, 2).tolist() == [[97, 98, 99]] * 2


@pytest.mark.parametrize("sequence_length", [1, 512, 10_000])
def test_the_text_of_the_package_serves_every_sequence_length(sequence_length: int) -> None:
    tokens = batch(read_text(None, sequence_length), 0, 0, 0, 1, 1)
    assert tokens.shape == (1, sequence_length + 1)
    assert tokens.max() < VOCABULARY


def test_a_file_of_any_bytes_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"\xff\x00\xfe")
    assert batch(read_text(path, 2), 0, 0, 0, 1, 1).tolist() == [[255, 0, 254]]


def test_a_file_that_cannot_serve_is_one_line_that_says_why(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_bytes(b"")
    short.write_bytes(b"12345")
    wrong = {
        tmp_path / "missing": "no such file or directory",
        tmp_path: "must be a regular file",
        empty: "is empty",
        short: r"has 5 bytes, at least 9 are needed \(model.sequence_length \+ 1\)",
    }
    for path, why in wrong.items():
        with pytest.raises(TextError, match=f"^data: {path}:? {why}$"):
            read_text(path, 8)


def test_a_small_vocabulary_folds_the_text_of_the_package_but_not_a_file(tmp_path: Path) -> None:
    tokens = batch(read_text(None, 50, vocab_size=7), 0, 0, 0, 1, 3)
    assert tokens.max() < 7
    path = tmp_path / "data"
    path.write_bytes(b"enough for a sequence")
    with pytest.raises(TextError, match=r"^model\.vocab_size: 7 must be at least 256"):
        read_text(path, 5, vocab_size=7)
