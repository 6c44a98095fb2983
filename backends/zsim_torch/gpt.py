"""A GPT in plain torch modules: what `zsim.gpt` describes, with the same units and names.

The units are the children of the module, in order: "embedding", "block0" and so on, "head". The
first reads the batch, tokens as int64 [sequences, sequence_length + 1]; a block reads the hidden
state [sequences, sequence_length, hidden_size]; the head reads hidden state and batch and returns
the mean cross entropy of each next token, in fp32 (fp64 in fp64). There is no dropout.
"""

import math
from hashlib import sha256
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.architecture import GPT

DEVIATION = 0.02
"""Standard deviation of initial weights (Radford et al. 2018, section 4.1)."""


def _embedding(rows: int, columns: int, dtype: torch.dtype) -> nn.Embedding:
    """An embedding without values: drawing them on "meta" would import torch's compiler (2.7 s)."""
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns, dtype=dtype))


class Embedding(nn.Module):
    """Sum of what is learned for each token and for each position."""

    def __init__(self, shape: GPT, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = _embedding(shape.vocab_size, shape.hidden_size, dtype)
        self.position = _embedding(shape.sequence_length, shape.hidden_size, dtype)

    def forward(self, batch: Tensor) -> Tensor:
        """Hidden state of all tokens of `batch` but the last of each sequence."""
        tokens = batch[:, :-1]
        places = torch.arange(tokens.shape[1], device=batch.device)
        words: Tensor = self.token(tokens)
        return words + cast("Tensor", self.position(places))


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer norm and beside a residual."""

    def __init__(self, shape: GPT, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.heads = shape.attention_heads
        self.ln1 = nn.LayerNorm(hidden, dtype=dtype)
        self.qkv = nn.Linear(hidden, 3 * hidden, dtype=dtype)
        self.proj = nn.Linear(hidden, hidden, dtype=dtype)
        self.ln2 = nn.LayerNorm(hidden, dtype=dtype)
        self.up = nn.Linear(hidden, 4 * hidden, dtype=dtype)
        self.down = nn.Linear(4 * hidden, hidden, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """The next hidden state."""
        attended: Tensor = self.proj(self._attend(self.qkv(self.ln1(hidden))))
        middle = hidden + attended
        wide: Tensor = functional.gelu(self.up(self.ln2(middle)))
        return middle + cast("Tensor", self.down(wide))

    def _attend(self, joined: Tensor) -> Tensor:
        """Softmax(Q K^T / sqrt(head size)) V of each head, over the past and the token itself."""
        sequences, length, triple = joined.shape
        size = triple // 3 // self.heads
        parts = joined.view(sequences, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.transpose(-1, -2) / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool, device=joined.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).reshape(sequences, length, triple // 3)


class Head(nn.Module):
    """Final layer norm, logits of each next token, and their mean cross entropy."""

    def __init__(self, shape: GPT, dtype: torch.dtype, *, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(shape.hidden_size, dtype=dtype)
        size = (shape.vocab_size, shape.hidden_size)
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype)) if tied is None else tied

    def forward(self, hidden: Tensor, batch: Tensor) -> Tensor:
        """The loss, a scalar."""
        logits = functional.linear(self.ln(hidden), self.weight).flatten(0, 1)
        if logits.dtype is not torch.float64:
            logits = logits.float()
        return functional.cross_entropy(logits, batch[:, 1:].flatten())


class Decoder(nn.Module):
    """The whole model. `units` names its children in the order of forward."""

    def __init__(self, shape: GPT, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = Embedding(shape, dtype)
        for layer in range(shape.layers):
            self.add_module(f"block{layer}", Block(shape, dtype))
        token = cast("nn.Parameter", self.embedding.token.weight)
        self.head = Head(shape, dtype, tied=token if shape.tied_embeddings else None)
        self.units = tuple(name for name, _ in self.named_children())

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of one micro-batch."""
        hidden: Tensor = self.embedding(batch)
        for name in self.units[1:-1]:
            hidden = self.get_submodule(name)(hidden)
        loss: Tensor = self.head(hidden, batch)
        return loss


def gpt(shape: GPT, *, dtype: torch.dtype = torch.float32, seed: int | None = 0) -> Decoder:
    """The model of `shape`, with the initial values of `seed`.

    Without a seed it has shapes and no values: its parameters are on the device "meta".
    """
    with torch.device("meta"):
        module = Decoder(shape, dtype)
    if seed is None:
        return module
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in made:  # a tied one is met twice
                value = initial_value(shape, names[parameter], parameter.shape, seed=seed)
                made[parameter] = nn.Parameter(value.to(dtype))
            setattr(part, name, made[parameter])
    return module


def initial_value(shape: GPT, name: str, size: tuple[int, ...], *, seed: int) -> Tensor:
    """What the parameter `name` starts from, in fp32: a function of the seed and the name alone.

    Weights are normal, those that write into the residual stream smaller by the square root of
    their number (Radford et al. 2019, section 2.3); biases are 0 and the scales of norms 1.
    """
    if name.endswith(".bias"):
        return torch.zeros(size)
    if name.split(".")[-2].startswith("ln"):
        return torch.ones(size)
    scale = math.sqrt(2 * shape.layers) if name.endswith(("proj.weight", "down.weight")) else 1
    digest = sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(size).normal_(0.0, DEVIATION / scale, generator=generator)
