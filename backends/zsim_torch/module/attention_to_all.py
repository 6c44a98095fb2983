"""Attention of a rank's queries to the keys and values of all ranks of a context group.

Saved for backward, as in `zsim.model.transformer`: queries, keys, values, the result, and one
number per row of scores.
"""

import math
from typing import Any

import torch
from torch import Tensor


class _Shared(torch.autograd.Function):
    """Causal attention of this rank's queries to all keys, with flash attention's saved tensors.

    Queries are [sequences, tokens, heads, size], keys and values [ranks, 2, sequences, tokens per
    rank, key-value heads, size]. `seen` is the mask [queries, keys]: True where a query attends to
    a key.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, gathered: Tensor, seen: Tensor) -> Tensor:  # noqa: ANN401
        """Return the attention output, [sequences, tokens, heads x size]."""
        rows, keys, values = _rows(query, gathered)
        scores = _scores(rows, keys, seen)
        sums = scores.logsumexp(-1)
        made = torch.matmul((scores - sums[..., None]).exp(), values)
        mixed = _tokens(made).to(query.dtype).flatten(2)
        ctx.save_for_backward(query, gathered, mixed, sums)
        ctx.seen = seen
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Recompute the scores and return gradients (Dao et al. 2022, appendix B.2)."""
        query, gathered, mixed, sums = ctx.saved_tensors
        rows, keys, values = _rows(query, gathered)
        groups = rows.shape[2]
        weights = (_scores(rows, keys, ctx.seen) - sums[..., None]).exp()
        slope = _heads(gradients[0].view(query.shape), groups)
        made = _heads(mixed.view(query.shape), groups)
        towards = torch.matmul(slope, values.transpose(-1, -2))
        of_scores = weights * (towards - (slope * made).sum(-1, keepdim=True))
        of_scores = of_scores / math.sqrt(query.shape[-1])
        of_query = _tokens(torch.matmul(of_scores, keys)).to(query.dtype)
        of_keys = torch.matmul(of_scores.transpose(-1, -2), rows).sum(2)
        of_values = torch.matmul(weights.transpose(-1, -2), slope).sum(2)
        ranks, _, sequences, tokens, shared, size = gathered.shape
        parts = [
            each.view(sequences, shared, ranks, tokens, size).permute(2, 0, 3, 1, 4)
            for each in (of_keys, of_values)
        ]
        return of_query, torch.stack(parts, 1).to(gathered.dtype), None


def attend_to_all(query: Tensor, gathered: Tensor, seen: Tensor) -> Tensor:
    """Return causal attention of queries to all keys in the mask `seen`; see `_Shared`."""
    made: Tensor = _Shared.apply(query, gathered, seen)  # type: ignore[no-untyped-call]
    return made


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _heads(tensor: Tensor, groups: int) -> Tensor:
    """Reshape [sequences, tokens, heads, size] to [sequences, shared, groups, tokens, size]."""
    sequences, tokens, heads, size = tensor.shape
    split = _wide(tensor).view(sequences, tokens, heads // groups, groups, size)
    return split.permute(0, 2, 3, 1, 4)


def _tokens(tensor: Tensor) -> Tensor:
    """Undo `_heads`."""
    return tensor.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _rows(query: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries by heads, and keys and values broadcast over the queries of a group."""
    sequences, shared, size = gathered.shape[2], gathered.shape[4], gathered.shape[5]
    keys, values = (
        _wide(each).permute(1, 3, 0, 2, 4).reshape(sequences, shared, 1, -1, size)
        for each in gathered.unbind(1)
    )
    return _heads(query, query.shape[2] // shared), keys, values


def _scores(rows: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    scores = torch.matmul(rows, keys.transpose(-1, -2)) / math.sqrt(rows.shape[-1])
    return scores.masked_fill(~seen, -math.inf)
