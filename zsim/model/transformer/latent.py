"""Attention with compressed keys and values: DeepSeek's multi-head latent attention.

The layers and their saved tensors follow `DeepseekV3Attention` (transformers 5). The
values stay a view of the layer that expands keys and values, so its whole output is saved.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from zsim.model.experts import Latent
from zsim.model.kernel import Kernel, KernelKind, flash_attention, streaming
from zsim.model.model import Value
from zsim.model.transformer.linear import linear, normalize
from zsim.model.transformer.operator import Operator, Stretch, Tensor
from zsim.model.transformer.size import Size


def latent_attention(size: Size, source: Value, target: Value, name: str) -> tuple[Stretch, ...]:
    """Return latent attention of the block `name`."""
    latent = size.shape.latent
    assert latent is not None
    heads, read = size.heads, size.whole(source)
    queries = size.rows(f"{name}/queries", heads * latent.head_size)
    keys = size.rows(f"{name}/keys", heads * latent.head_size)
    turned = size.rows(f"{name}/queries/turned", heads * latent.head_size)
    attended = size.rows(f"{name}/attended", heads * latent.value_size)
    compressed, expanded, expansion = _expansion(size, latent, read, name)
    operators = (
        *_queries(size, read, queries, name),
        *expansion,
        _turn(size, (queries,), turned, moved=2 * queries.elements),
        _turn(
            size,
            (expanded, compressed),
            keys,
            moved=size.tokens * (heads * latent.nope_size + latent.rope_size) + keys.elements,
        ),
        _attend(size, (turned, keys, expanded), attended, name),
        _layer(size, attended, size.whole(target), f"{name}.proj"),
    )
    return (Stretch(inputs=(source.name,), outputs=(target,), operators=operators),)


def _layer(
    size: Size, source: Tensor, target: Tensor, name: str, *, biased: bool = False
) -> Operator:
    """Return the linear layer `name`, in the format of the linear layers of blocks."""
    rows, columns = (each.elements // size.tokens for each in (target, source))
    weight = replace(
        size.copied(f"{name}.weight", rows, columns), float8=size.shape.execution.float8_gathers
    )
    bias = size.copied(f"{name}.bias", rows) if biased else None
    return linear(size, source, target, weight, bias=bias, narrow=size.narrow)


def _queries(size: Size, read: Tensor, target: Tensor, name: str) -> tuple[Operator, ...]:
    """Return the layer of queries, or two with a norm between them."""
    latent = size.shape.latent
    assert latent is not None
    if latent.query_rank is None:
        return (_layer(size, read, target, f"{name}.q"),)
    low = size.rows(f"{name}/q_a", latent.query_rank)
    normed = size.rows(f"{name}/q_a/normed", latent.query_rank)
    return (
        _layer(size, read, low, f"{name}.q_a", biased=latent.bias),
        normalize(size, low, normed, f"{name}.ln_q", width=latent.query_rank),
        _layer(size, normed, target, f"{name}.q_b"),
    )


def _expansion(
    size: Size, latent: Latent, read: Tensor, name: str
) -> tuple[Tensor, Tensor, tuple[Operator, ...]]:
    """Return compressed and expanded keys and values, and the operators that compute them."""
    rank = latent.key_value_rank
    compressed = size.rows(f"{name}/kv_a", rank + latent.rope_size)
    normed = size.rows(f"{name}/kv_a/normed", rank)
    expanded = size.rows(f"{name}/kv_b", size.heads * (latent.nope_size + latent.value_size))
    part = size.rows(compressed.name, rank)  # a view of the first elements of each row
    norm = normalize(size, part, normed, f"{name}.ln_kv", width=rank)
    kept = tuple(compressed if each == part else each for each in norm.saves)
    operators = (
        _layer(size, read, compressed, f"{name}.kv_a", biased=latent.bias),
        replace(norm, reads=(compressed,), saves=kept),
        _layer(size, normed, expanded, f"{name}.kv_b"),
    )
    return compressed, expanded, operators


def _turn(size: Size, sources: Sequence[Tensor], target: Tensor, *, moved: int) -> Operator:
    """Return the rotation of the elements with positions, joined to the others in a new tensor."""
    kind = KernelKind.ELEMENTWISE if size.shape.execution.compiled else KernelKind.ROTARY
    shape = (size.tokens, target.elements // size.tokens)

    def kernel(*, backward: bool) -> Kernel:
        made = streaming(kind, shape, size.dtype, streams=2, backward=backward)
        return replace(made, flops=moved, bytes=moved * size.dtype.size_bytes)

    return Operator(
        reads=tuple(sources),
        makes=target,
        forward=(kernel(backward=False),),
        backward=(kernel(backward=True),),
    )


def _attend(size: Size, sources: tuple[Tensor, ...], target: Tensor, name: str) -> Operator:
    """Return flash attention whose values are narrower, or wider, than its keys.

    Scores take products of the size of keys, results of that of values, so one kernel of the mean
    size has the FLOPs of both.
    """
    latent = size.shape.latent
    assert latent is not None
    mean = -(-(latent.head_size + latent.value_size) // 2)
    shape = (size.sequences, size.heads, size.heads, size.length, size.length, mean)
    sums = Tensor(name=f"{name}/sums", elements=size.tokens * size.heads, dtype=size.wide)
    pairs = prod((size.sequences, size.heads, size.length, size.length))
    rows = size.tokens * size.heads * size.dtype.size_bytes
    version = size.shape.attention.version

    def kernel(*, backward: bool) -> Kernel:
        made = flash_attention(shape, size.dtype, backward=backward, version=version)
        passes = 2 if backward else 1
        return replace(
            made,
            flops=passes * 2 * pairs * (latent.head_size + latent.value_size),
            bytes=passes * rows * 2 * (latent.head_size + latent.value_size),
        )

    return Operator(
        reads=sources,
        makes=target,
        saves=(*sources, target, sums),
        forward=(kernel(backward=False),),
        backward=(kernel(backward=True),),
    )
