"""Causal self-attention in plain torch with the saved tensors of `zsim.model.transformer`.

Queries are [sequences, tokens, heads, head size]. Keys and values have the same shape, with fewer
heads if several query heads share one.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zsim.model.architecture import Attention, Positions, Transformer

ROTARY_BASE = 10_000.0
"""Base of the angles' frequencies (Su et al. 2021, section 3.2.2)."""


class _Rotated(torch.autograd.Function):
    """Rotary embedding of the first heads; backward rotates back, so nothing is saved."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, count: int, places: Tensor | None) -> Tensor:  # noqa: ANN401  (torch's own)
        """Rotate the first `count` heads and copy the others."""
        ctx.count, ctx.places = count, places
        return _rotate(heads, count, places, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Rotate by the opposite angle."""
        return _rotate(gradients[0], ctx.count, ctx.places, -1.0), None, None


def _rotate(heads: Tensor, count: int, places: Tensor | None, sign: float) -> Tensor:
    half = heads.shape[-1] // 2
    if places is None:
        places = torch.arange(heads.shape[1], device=heads.device)
    places = places.to(torch.float32)
    steps = torch.arange(half, device=heads.device, dtype=torch.float32)
    angles = places[:, None, None] * ROTARY_BASE ** (-steps / half)
    cosine, sine = angles.cos().to(heads.dtype), (sign * angles.sin()).to(heads.dtype)
    made = torch.empty_like(heads, memory_format=torch.contiguous_format)
    low, high = heads[:, :, :count, :half], heads[:, :, :count, half:]
    made[:, :, :count, :half] = low * cosine - high * sine
    made[:, :, :count, half:] = high * cosine + low * sine
    made[:, :, count:] = heads[:, :, count:]
    return made


def rotated(heads: Tensor, count: int, places: Tensor | None = None) -> Tensor:
    """Return `heads` [sequences, tokens, heads, size] with the first `count` heads rotated.

    `places` are the positions of the tokens in their sequence; by default 0, 1, and so on.
    """
    made: Tensor = _Rotated.apply(heads, count, places)  # type: ignore[no-untyped-call]
    return made


def attend_to(shape: Transformer, made: Sequence[Tensor]) -> Tensor:
    """Return attention of the outputs of the projections: queries, keys and values, or joined.

    The result is [sequences, tokens, heads x head size].
    """
    heads, shared = shape.attention_heads, shape.shared_heads
    turns = shape.positions is Positions.ROTARY
    parts = [each.view(*each.shape[:-1], -1, shape.head_width) for each in made]
    if shape.joined_qkv:
        joined = rotated(parts[0], heads + shared) if turns else parts[0]
        parts = list(torch.split(joined, [heads, shared, shared], 2))
    elif turns:
        parts[:2] = rotated(parts[0], heads), rotated(parts[1], shared)
    return attend(shape, *parts)


def attend(shape: Transformer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention: the mean of values, weighted by softmax(Q K^T / sqrt(size)).

    The result is [sequences, tokens, heads x head size].
    """
    if shape.attention is not Attention.PLAIN:
        found = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=shape.shared_heads != shape.attention_heads,
        )
        return found.transpose(1, 2).flatten(2)
    alibi = shape.positions is Positions.ALIBI
    if shape.recompute_attention:
        again: Tensor = _Again.apply(alibi, query, key, value)  # type: ignore[no-untyped-call]
        return again
    return _plain(query, key, value, alibi=alibi)


def _plain(query: Tensor, key: Tensor, value: Tensor, *, alibi: bool) -> Tensor:
    """Return attention with all scores in memory; it saves its three operands and the softmax.

    The operands are always copied to the layout of batched products, so that only the copies are
    saved, not the tensors that they are views of.
    """
    sequences, length, heads, size = query.shape
    shared = key.shape[2]
    groups = heads // shared
    split = query.view(sequences, length, shared, groups, size).permute(0, 2, 3, 1, 4)
    rows = _copied(split).view(sequences * shared, groups * length, size)
    keys, values = (
        _copied(each.transpose(1, 2)).view(sequences * shared, length, size)
        for each in (key, value)
    )
    bias = _bias(query, shared, alibi=alibi)
    scores = torch.baddbmm(bias, rows, keys.transpose(1, 2), alpha=1 / math.sqrt(size))
    mixed = torch.bmm(scores.softmax(-1), values)
    return mixed.view(sequences, shared, groups, length, size).permute(0, 3, 1, 2, 4).flatten(2)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _bias(query: Tensor, shared: int, *, alibi: bool) -> Tensor:
    """Return the bias of scores: -inf for future keys and, with ALiBi, a penalty for distance.

    The slopes of ALiBi are a geometric sequence (Press et al. 2021, section 3).
    """
    sequences, length, heads, _ = query.shape
    future = torch.full((length, length), -math.inf, dtype=query.dtype, device=query.device).triu(1)
    if not alibi:
        return future.repeat(heads // shared, 1)  # the same for all products of the batch
    places = torch.arange(length, device=query.device, dtype=query.dtype)
    order = torch.arange(1, heads + 1, device=query.device, dtype=query.dtype)
    slopes = 2.0 ** (-8.0 * order / heads)
    bias = future + slopes[:, None, None] * (places[None, :] - places[:, None])
    return bias.reshape(shared, heads // shared * length, length).repeat(sequences, 1, 1)


class _Again(torch.autograd.Function):
    """Plain attention that saves only its operands; its backward recomputes it."""

    @staticmethod
    def forward(ctx: Any, alibi: bool, *operands: Tensor) -> Tensor:  # noqa: ANN401, FBT001  (torch)
        """Return attention of queries, keys and values, without a graph."""
        ctx.save_for_backward(*operands)
        ctx.alibi = alibi
        query, key, value = operands
        return _plain(query, key, value, alibi=alibi)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return gradients of the three operands."""
        operands = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            query, key, value = operands
            found = _plain(query, key, value, alibi=ctx.alibi)
        return (None, *torch.autograd.grad(found, operands, gradients[0]))
