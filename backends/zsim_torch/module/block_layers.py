"""Linear layers of a block, and the activation between those of its MLP."""

from torch import Tensor
from torch.nn import functional

from zsim.model.architecture import Activation, QKNorm, Transformer


def projections(shape: Transformer) -> tuple[str, ...]:
    """Return the linear layers before attention, by name."""
    return ("qkv",) if shape.joined_qkv else ("q", "k", "v")


def norms_of_projections(shape: Transformer) -> dict[str, int]:
    """Return the width of the norm of queries and of keys, by the name of the linear layer."""
    if shape.qk_norm is None:
        return {}
    if shape.qk_norm is QKNorm.HEAD:
        return dict.fromkeys(("q", "k"), shape.head_width)
    heads = {"q": shape.attention_heads, "k": shape.shared_heads}
    return {name: count * shape.head_width for name, count in heads.items()}


def linear_layers(shape: Transformer) -> dict[str, tuple[int, int, bool]]:
    """Return rows and columns of each linear layer of a block, and True if it has a bias."""
    hidden, wide, size = shape.hidden_size, shape.wide, shape.head_width
    queries, keys = shape.attention_heads * size, shape.shared_heads * size
    widths = {"q": queries, "k": keys, "v": keys, "qkv": queries + 2 * keys}
    found = {name: (widths[name], hidden, shape.biased_qkv) for name in projections(shape)}
    found["proj"] = (hidden, queries, shape.biased_output)
    if shape.activation is Activation.SWIGLU:
        found["gate"] = (wide, hidden, shape.bias)
    return found | {"up": (wide, hidden, shape.bias), "down": (hidden, wide, shape.bias)}


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """Return the input of the last layer of an MLP."""
    return functional.gelu(up) if gate is None else functional.silu(gate) * up
