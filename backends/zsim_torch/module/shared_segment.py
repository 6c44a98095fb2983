"""Segments of a transformer on a rank of a context group: it holds some tokens of each sequence."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from zsim.model.architecture import Positions, Transformer
from zsim_torch.module.attention_to_all import attend_to_all
from zsim_torch.module.block_layers import norms_of_projections, projections
from zsim_torch.module.causal_attention import rotated
from zsim_torch.module.context_place import ContextPlace
from zsim_torch.module.norm import norm
from zsim_torch.module.transformer import (
    Embedding,
    add_perceptron,
    add_projections,
    next_token_loss,
    perceptron,
    projected,
)


def own_shape(shape: Transformer, place: ContextPlace) -> Transformer:
    """Return the shape of a rank's part of the transformer in a context group."""
    return replace(
        shape,
        sequence_length=shape.sequence_length // place.ranks,
        position_embeddings=shape.places or None,
        execution=replace(shape.execution, context=1),
    )


class OwnEmbedding(Embedding):
    """Learned embeddings of this rank's tokens and their positions."""

    def __init__(self, shape: Transformer, place: ContextPlace, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.place = place

    def forward(self, batch: Tensor) -> Tensor:
        """Return the hidden state of this rank's tokens of `batch`."""
        words: Tensor = self.token(self.place.own(batch[:, :-1], 1))
        if self.position is None:
            return words
        return words + self.place.own(self.position.weight[: batch.shape[1] - 1], 0)


class QueriesAndKeysSegment(nn.Module):
    """Norm and projections before attention: outputs queries, and keys followed by values."""

    def __init__(self, shape: Transformer, place: ContextPlace, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.place = shape, place
        self.ln1 = norm(shape, dtype)
        add_projections(self, shape, dtype)
        del self.proj

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [sequences, tokens, heads x size], and keys and values as one flat tensor.

        Keys precede values in the second tensor.
        """
        shape = self.shape
        heads, shared, size = shape.attention_heads, shape.shared_heads, shape.head_width
        normed = self.ln1(hidden.view(-1, shape.sequence_length, shape.hidden_size))
        made = projected(self, shape, normed)
        parts = [each.view(*each.shape[:-1], -1, size) for each in made]
        places = self.place.tokens(
            shape.sequence_length * self.place.ranks, torch.device(hidden.device)
        )
        turns = shape.positions is Positions.ROTARY
        if shape.joined_qkv:
            joined = rotated(parts[0], heads + shared, places) if turns else parts[0]
            query, *others = torch.split(joined, [heads, shared, shared], 2)
            query = query.clone(memory_format=torch.contiguous_format)
        else:
            if turns:
                parts[:2] = rotated(parts[0], heads, places), rotated(parts[1], shared, places)
            query, *others = parts
        return query.flatten(2), torch.cat([each.flatten() for each in others])


class AttendedSegment(nn.Module):
    """The rest of a block, from attention to all tokens on."""

    def __init__(self, shape: Transformer, place: ContextPlace, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.place = shape, place
        add_projections(self, shape, dtype)
        for name in (*projections(shape), *(f"ln_{name}" for name in norms_of_projections(shape))):
            delattr(self, name)
        self.ln2 = norm(shape, dtype)
        add_perceptron(self, shape, dtype)

    def forward(self, queries: Tensor, hidden: Tensor, gathered: Tensor) -> Tensor:
        """Return the next hidden state."""
        shape, ranks, length = self.shape, self.place.ranks, self.shape.sequence_length
        size, device = shape.head_width, torch.device(hidden.device)
        own = self.place.tokens(ranks * length, device)
        seen = self.place.all_tokens(ranks * length, device) <= own[:, None]
        mixed = attend_to_all(
            queries.view(-1, length, shape.attention_heads, size),
            gathered.view(ranks, 2, -1, length, shape.shared_heads, size),
            seen,
        )
        hidden = hidden.view(-1, length, shape.hidden_size)
        middle = hidden + self.get_submodule("proj")(mixed)
        read = hidden if shape.parallel_residual else middle
        made: Tensor = middle + perceptron(self, shape, self.ln2(read))
        return made


def own_loss(logits: Tensor, batch: Tensor, place: ContextPlace) -> Tensor:
    """Return the mean cross entropy of `logits`, [tokens of this rank, vocabulary]."""
    targets = place.own(batch[:, 1:], 1)
    return next_token_loss(logits, torch.cat((batch[:, :1], targets), 1))  # drops column 0
