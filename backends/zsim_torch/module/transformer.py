"""A transformer in plain torch modules, with the units and names of `zsim.model.transformer`.

The units are the children of the module, in order: "embedding", "block0" and so on, "head"; for
blocks in tiles, the children of the blocks (`zsim_torch.module.tiled_block`). The embedding reads
the batch, tokens as int64 [sequences, sequence_length + 1]. A block reads the hidden state
[sequences, sequence_length, hidden_size]. The head reads hidden state and batch and returns the
mean cross entropy of each next token, in fp32 (fp64 in fp64). There is no dropout.
"""

import math
from collections.abc import Sequence
from hashlib import sha256
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import Activation, Transformer
from zsim_torch.module.block_layers import (
    activate,
    linear_layers,
    norms_of_projections,
    projections,
)
from zsim_torch.module.causal_attention import attend_to
from zsim_torch.module.mixture_layers import add_mixture, mixed
from zsim_torch.module.norm import norm
from zsim_torch.module.tiled_block import TiledBlock, layer_of_tile, tiled_units

DEVIATION = 0.02
"""Standard deviation of initial weights (Radford et al. 2018, section 4.1)."""


def _embedding(rows: int, columns: int, dtype: torch.dtype) -> nn.Embedding:
    """Return an embedding without values: drawing them on "meta" imports torch's compiler."""
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns, dtype=dtype))


class Embedding(nn.Module):
    """Learned embeddings of tokens and, if positions are learned, of positions."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = _embedding(shape.vocab_size, shape.hidden_size, dtype)
        self.position = None
        if shape.places:
            self.position = _embedding(shape.places, shape.hidden_size, dtype)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the hidden state of all tokens of `batch` but the last of each sequence."""
        tokens = batch[:, :-1]
        words: Tensor = self.token(tokens)
        return words if self.position is None else words + self.position.weight[: tokens.shape[1]]


def add_projections(
    part: nn.Module, shape: Transformer, dtype: torch.dtype, *, bias: bool | None = None
) -> None:
    """Add the linear layers of attention to `part`; `bias` overrides that of its output layer.

    Norms of queries and keys are added with them.
    """
    _add_layers(part, shape, (*projections(shape), "proj"), dtype, bias=bias)
    for name, width in norms_of_projections(shape).items():
        part.add_module(f"ln_{name}", norm(shape, dtype, width))


def _add_layers(
    part: nn.Module,
    shape: Transformer,
    names: Sequence[str],
    dtype: torch.dtype,
    *,
    bias: bool | None,
) -> None:
    """Add linear layers to `part`; `bias` overrides that of the last."""
    layers = linear_layers(shape)
    for name in names:
        rows, columns, biased = layers[name]
        if name == names[-1] and bias is not None:
            biased = bias
        part.add_module(name, nn.Linear(columns, rows, bias=biased, dtype=dtype))


def projected(part: nn.Module, shape: Transformer, normed: Tensor) -> list[Tensor]:
    """Return the outputs of the projections of `part`, after norms of queries and keys if any."""
    made: list[Tensor] = []
    widths = norms_of_projections(shape)
    for name in projections(shape):
        rows: Tensor = part.get_submodule(name)(normed)
        if name in widths:
            parts = rows.view(*rows.shape[:-1], -1, widths[name])
            rows = part.get_submodule(f"ln_{name}")(parts).flatten(-2)
        made.append(rows)
    return made


def attention(part: nn.Module, shape: Transformer, normed: Tensor) -> Tensor:
    """Return causal self-attention by the linear layers of `part`."""
    made = projected(part, shape, normed)
    result: Tensor = part.get_submodule("proj")(attend_to(shape, made))
    return result


def add_perceptron(
    part: nn.Module, shape: Transformer, dtype: torch.dtype, *, bias: bool | None = None
) -> None:
    """Add the linear layers of an MLP to `part`; `bias` overrides that of its output layer."""
    gate = ("gate",) if shape.activation is Activation.SWIGLU else ()
    _add_layers(part, shape, (*gate, "up", "down"), dtype, bias=bias)


def perceptron(part: nn.Module, shape: Transformer, normed: Tensor) -> Tensor:
    """Return the output of an MLP by the linear layers of `part`."""
    gate = None
    if shape.activation is Activation.SWIGLU:
        gate = part.get_submodule("gate")(normed)
    made: Tensor = part.get_submodule("down")(activate(gate, part.get_submodule("up")(normed)))
    return made


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each with a norm before it and a residual.

    With `mixes`, experts take the place of the MLP.
    """

    def __init__(self, shape: Transformer, dtype: torch.dtype, *, mixes: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.ln1 = norm(shape, dtype)
        add_projections(self, shape, dtype)
        self.ln2 = norm(shape, dtype)
        self.mixes = mixes
        (add_mixture if mixes else add_perceptron)(self, shape, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        shape = self.shape
        middle = hidden + attention(self, shape, self.ln1(hidden))
        normed = self.ln2(hidden if shape.parallel_residual else middle)
        if not self.mixes:
            return middle + perceptron(self, shape, normed)
        made, _ = mixed(self, shape, normed)
        return middle + made


class Head(nn.Module):
    """Final norm, logits of each next token, and their mean cross entropy."""

    def __init__(
        self, shape: Transformer, dtype: torch.dtype, *, tied: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.ln = norm(shape, dtype)
        size = (shape.vocab_size, shape.hidden_size)
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype)) if tied is None else tied

    def forward(self, hidden: Tensor, batch: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        return next_token_loss(functional.linear(self.ln(hidden), self.weight).flatten(0, 1), batch)


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of `logits`, [tokens, vocabulary], at least in fp32."""
    if logits.dtype is not torch.float64:
        logits = logits.float()
    return functional.cross_entropy(logits, batch[:, 1:].clone().flatten())


class NextTokenLoss(nn.Module):
    """Mean cross entropy of the logits of another segment."""

    def forward(self, logits: Tensor, batch: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        return next_token_loss(logits.view(batch.shape[0] * (batch.shape[1] - 1), -1), batch)


class Decoder(nn.Module):
    """The whole model. `units` names its children in the order of forward."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = Embedding(shape, dtype)
        blocks = [f"block{layer}" for layer in range(shape.layers)]
        for layer, name in enumerate(blocks):
            module = shape.module_of(layer)
            if module != layer:
                made = self.get_submodule(blocks[module])
            elif shape.execution.tiles > 1:
                made = TiledBlock(shape, dtype)
            else:
                made = TransformerBlock(shape, dtype, mixes=shape.has_experts(layer))
            self.add_module(name, made)
        token = cast("nn.Parameter", self.embedding.token.weight)
        self.head = Head(shape, dtype, tied=token if shape.tied_embeddings else None)
        self.blocks = tuple(blocks)
        parts = ("",) if shape.execution.tiles == 1 else tiled_units(shape)
        self.units = ("embedding", *(f"{each}{part}" for each in blocks for part in parts), "head")

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of one micro-batch."""
        hidden: Tensor = self.embedding(batch)
        for name in self.blocks:
            hidden = self.get_submodule(name)(hidden)
        loss: Tensor = self.head(hidden, batch)
        return loss


def transformer(
    shape: Transformer, *, dtype: torch.dtype = torch.float32, seed: int | None = 0
) -> Decoder:
    """Return the model of `shape`, with the initial values of `seed`.

    Without a seed, its parameters have shapes but no values: they are on the device "meta".
    """
    with torch.device("meta"):
        module = Decoder(shape, dtype)
    if seed is None:
        return module
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in made:  # a tied one occurs twice
                value = initial_value(shape, names[parameter], parameter.shape, seed=seed)
                made[parameter] = nn.Parameter(
                    value.to(parameter.dtype), requires_grad=parameter.requires_grad
                )
            setattr(part, name, made[parameter])
    return module


def initial_value(shape: Transformer, name: str, size: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the initial value of the parameter `name` in fp32, a function of seed and name.

    Weights are normal; those that write to the residual stream are divided by the square root of
    their number (Radford et al. 2019, section 2.3). Biases are 0 and scales of norms 1. A tile has
    its rows of the untiled layer.
    """
    if name.endswith((".bias", ".score_bias")):
        return torch.zeros(size)
    if name.split(".")[-2].startswith("ln"):
        return torch.ones(size)
    whole, rows = size, slice(None)
    if shape.execution.tiles > 1 and name.startswith("block"):
        name, rows = layer_of_tile(shape, name)
        whole = (linear_layers(shape)[name.split(".")[-2]][0], *size[1:])
    scale = math.sqrt(2 * shape.layers) if name.endswith(("proj.weight", "down.weight")) else 1
    digest = sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(whole).normal_(0.0, DEVIATION / scale, generator=generator)[rows]
