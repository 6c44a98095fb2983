"""What blocks keep that have other norms, MLPs and biases: what autograd keeps of them, by hand.

The blocks are written here from their papers, with the norms and the attention of `zsim_torch`.
"""

import pytest
import torch
from kept_by_autograd import kept_by_autograd
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import (
    GPT,
    Activation,
    Architecture,
    Llama,
    Norm,
    NormPlacement,
    Positions,
    QKNorm,
    Transformer,
)
from zsim.model.transformer import transformer
from zsim_torch.module.causal_attention import attend, rotated
from zsim_torch.module.norm import RootMeanSquareNorm

WIDTH, HEADS, SHARED, SIZE, INNER, TOKENS = 24, 4, 2, 6, 10, 5


def llama(**fields: object) -> Architecture:
    given = {"key_value_heads": SHARED, "head_size": SIZE, "intermediate_size": INNER} | fields
    return Llama(layers=2, hidden_size=WIDTH, **COMMON, **given)  # type: ignore[arg-type]


COMMON = {"attention_heads": HEADS, "sequence_length": TOKENS, "vocab_size": 7}


def rms(width: int) -> nn.Module:
    return RootMeanSquareNorm(width, torch.float32)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def in_heads(rows: Tensor) -> Tensor:
    return rows.view(*rows.shape[:-1], -1, SIZE)


class Attending(nn.Module):
    """Attention with rotary positions; `heads_apart` norms each head, else all of them together."""

    def __init__(self, shape: Transformer, *, bias: bool = False) -> None:
        super().__init__()
        self.shape = shape
        shared = shape.shared_heads
        self.q = linear(WIDTH, HEADS * SIZE, bias=bias)
        self.k = linear(WIDTH, shared * SIZE, bias=bias)
        self.v = linear(WIDTH, shared * SIZE, bias=bias)
        self.o = linear(HEADS * SIZE, WIDTH, bias=bias)

    def forward(self, given: Tensor) -> Tensor:
        """Return what is added to the hidden state."""
        query, key, value = (*self.normed(self.q(given), self.k(given)), self.v(given))
        query, key, value = (in_heads(each) for each in (query, key, value))
        query, key = rotated(query, query.shape[2]), rotated(key, key.shape[2])
        made: Tensor = self.o(attend(self.shape, query, key, value))
        return made

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys as they are."""
        return query, key


class HeadNormed(Attending):
    """As Qwen 3: every head by itself."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__(shape)
        self.q_norm, self.k_norm = rms(SIZE), rms(SIZE)

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return heads over their root mean square."""
        heads = (in_heads(each) for each in (query, key))
        query, key = (
            norm(each) for norm, each in zip((self.q_norm, self.k_norm), heads, strict=True)
        )
        return query.flatten(-2), key.flatten(-2)


class WidthNormed(Attending):
    """As OLMo 2: all heads together."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__(shape)
        self.q_norm, self.k_norm = rms(HEADS * SIZE), rms(SHARED * SIZE)

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys over their root mean square."""
        return self.q_norm(query), self.k_norm(key)


class Gated(nn.Module):
    """SwiGLU or GeGLU."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            linear(WIDTH, INNER),
            linear(WIDTH, INNER),
            linear(INNER, WIDTH),
        )
        self.curve = functional.gelu if shape.activation is Activation.GEGLU else functional.silu

    def forward(self, given: Tensor) -> Tensor:
        """Return what is added to the hidden state."""
        made: Tensor = self.down(self.curve(self.gate(given)) * self.up(given))
        return made


class Curved(nn.Module):
    """Two linear layers with biases, ReLU or GELU between them."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, INNER, bias=True), linear(INNER, WIDTH, bias=True)
        self.curve = functional.relu if shape.activation is Activation.RELU else functional.gelu

    def forward(self, given: Tensor) -> Tensor:
        """Return what is added to the hidden state."""
        made: Tensor = self.down(self.curve(self.up(given)))
        return made


class Squared(nn.Module):
    """Two linear layers, squared ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        """Return what is added to the hidden state."""
        made: Tensor = self.down(functional.relu(self.up(given)).square())
        return made


class Nemotron(nn.Module):
    """Pre-norm with layer norms, squared ReLU without a gate."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.a, self.b = Attending(shape), Squared()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        hidden = hidden + self.a(self.n1(hidden))
        made: Tensor = hidden + self.b(self.n2(hidden))
        return made


class Qwen3(nn.Module):
    """Pre-norm, heads of queries and keys normed."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.a, self.b = HeadNormed(shape), Gated(shape)
        self.n1, self.n2 = rms(WIDTH), rms(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        hidden = hidden + self.a(self.n1(hidden))
        made: Tensor = hidden + self.b(self.n2(hidden))
        return made


class Olmo2(nn.Module):
    """Norms behind attention and MLP."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.a, self.b = WidthNormed(shape), Gated(shape)
        self.n1, self.n2 = rms(WIDTH), rms(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        hidden = hidden + self.n1(self.a(hidden))
        made: Tensor = hidden + self.n2(self.b(hidden))
        return made


class Gemma2(nn.Module):
    """Norms before and behind."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.a, self.b = Attending(shape), Gated(shape)
        self.n1, self.n2, self.n3, self.n4 = (rms(WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        hidden = hidden + self.n2(self.a(self.n1(hidden)))
        made: Tensor = hidden + self.n4(self.b(self.n3(hidden)))
        return made


class Phi(nn.Module):
    """Attention and MLP side by side behind one norm, with biases."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.a, self.b = Attending(shape, bias=True), Curved(shape)
        self.n = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        normed = self.n(hidden)
        made: Tensor = hidden + self.a(normed) + self.b(normed)
        return made


class Opt(nn.Module):
    """Pre-norm with biases and ReLU."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.a, self.b = Attending(shape, bias=True), Curved(shape)
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        hidden = hidden + self.a(self.n1(hidden))
        made: Tensor = hidden + self.b(self.n2(hidden))
        return made


class Olmo(nn.Module):
    """Pre-norm, whose norms have no parameters."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.a, self.b = Attending(shape), Gated(shape)
        self.n1, self.n2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        hidden = hidden + self.a(self.n1(hidden))
        made: Tensor = hidden + self.b(self.n2(hidden))
        return made


PHI = {
    "positions": Positions.ROTARY,
    "joined_qkv": False,
    "intermediate_size": INNER,
}


def gpt(**fields: object) -> Architecture:
    return GPT(layers=2, hidden_size=WIDTH, **COMMON, **PHI, **fields)  # type: ignore[arg-type]


BLOCKS: dict[type[nn.Module], Architecture] = {
    Qwen3: llama(qk_norm=QKNorm.HEAD),
    Olmo2: llama(qk_norm=QKNorm.WIDTH, norm_placement=NormPlacement.AFTER),
    Gemma2: llama(norm_placement=NormPlacement.BOTH, activation=Activation.GEGLU),
    Phi: gpt(parallel_residual=True, shared_norm=True),
    Opt: gpt(activation=Activation.RELU),
    Olmo: llama(norm=Norm.LAYER, norm_weight=False, norm_bias=False),
    Nemotron: llama(norm=Norm.LAYER, norm_bias=True, activation=Activation.RELU2),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_keeps_what_autograd_keeps_and_has_as_many_parameters(
    kind: type[nn.Module],
) -> None:
    shape, module = BLOCKS[kind], kind(BLOCKS[kind])
    unit = transformer(shape, micro_batch_size=3).units[2]
    hidden = torch.zeros(3, TOKENS, WIDTH, requires_grad=True)
    kept = kept_by_autograd(module, [hidden])
    (segment,) = unit.segments
    assert kept == (segment.saved_bytes, segment.saves_input)
    counted = sum(each.elements for each in unit.parameters)
    assert counted == sum(each.numel() for each in module.parameters())
