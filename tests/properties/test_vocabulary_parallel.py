"""Embedding and cross entropy in parts of the vocabulary, summed, are those of the whole."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from zsim_torch.module.vocabulary_parallel import (
    OwnVocabulary,
    mean_cross_entropy,
    statistics,
    words,
)


def parts_of(vocabulary: int, ranks: int) -> list[tuple[OwnVocabulary, int]]:
    """The part of each rank, and how many rows it has with its padding."""
    rows = -(-vocabulary // ranks)
    starts = [min(rank * rows, vocabulary) for rank in range(ranks)]
    return [(OwnVocabulary(start, min(start + rows, vocabulary)), rows) for start in starts]


def padded(rows: Tensor, own: OwnVocabulary, count: int) -> Tensor:
    """A rank's rows, with others behind them that no token has."""
    mine = rows[own.start : own.end]
    return torch.cat([mine, torch.full((count - len(mine), rows.shape[1]), 50.0).to(rows)])


@settings(deadline=None, max_examples=60)
@given(
    vocabulary=st.integers(1, 9),
    ranks=st.integers(1, 4),
    sequences=st.integers(1, 3),
    length=st.integers(1, 4),
    shift=st.sampled_from([0.0, 100.0, -100.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
)
def test_cross_entropy_of_parts_is_that_of_the_whole_far_from_zero_too(
    vocabulary: int,
    ranks: int,
    sequences: int,
    length: int,
    shift: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
    logits = torch.randn(sequences * length, vocabulary, generator=generator).to(dtype) * 3 + shift
    exact = logits.double().clone().requires_grad_()
    loss = functional.cross_entropy(exact, batch[:, 1:].flatten())
    (slope,) = torch.autograd.grad(loss, [exact])
    summands: list[Tensor] = []
    own_logits: list[Tensor] = []
    parts = parts_of(vocabulary, ranks)
    for own, rows in parts:
        own_logits.append(padded(logits.t(), own, rows).t().contiguous().requires_grad_())
        summands.append(statistics(own_logits[-1], batch, own))
    summed = torch.stack(summands).sum(0).detach().requires_grad_()
    found = mean_cross_entropy(summed)
    (incoming,) = torch.autograd.grad(found, [summed])
    bound = 1e-11 if dtype is torch.float64 else 3e-5 if shift else 2e-6
    torch.testing.assert_close(found.double(), loss, rtol=bound, atol=bound)
    for (own, _), given_logits, made in zip(parts, own_logits, summands, strict=True):
        (gradient,) = torch.autograd.grad(made, [given_logits], incoming)
        count = own.end - own.start
        mine = gradient.double()
        expected = slope[:, own.start : own.end]
        torch.testing.assert_close(mine[:, :count], expected, rtol=bound, atol=bound)
        assert not mine[:, count:].any()


@settings(deadline=None, max_examples=30)
@given(
    vocabulary=st.integers(1, 9),
    ranks=st.integers(1, 4),
    sequences=st.integers(1, 3),
    length=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_embeddings_of_parts_sum_to_that_of_the_whole_to_the_bit(
    vocabulary: int, ranks: int, sequences: int, length: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
    table = torch.randn(vocabulary, 5, generator=generator).requires_grad_()
    whole = functional.embedding(batch[:, :-1], table)
    incoming = torch.randn(whole.shape, generator=generator)
    (slope,) = torch.autograd.grad(whole, [table], incoming)
    summed = torch.zeros_like(whole)
    for own, rows in parts_of(vocabulary, ranks):
        part = padded(table.detach(), own, rows).requires_grad_()
        made = words(batch, part, own)
        summed = summed + made.detach()
        (gradient,) = torch.autograd.grad(made, [part], incoming)
        count = own.end - own.start
        assert torch.equal(gradient[:count], slope[own.start : own.end])
        assert not gradient[count:].any()
    assert torch.equal(summed, whole)
