"""Attention with compressed keys and values: DeepSeek's multi-head latent attention.

The layers and their saved tensors follow `DeepseekV3Attention` (transformers 5). The
values stay a view of the layer that expands keys and values, so its whole output is saved.

Ranks of a tensor axis hold parts of the heads: of the layers that expand, and of the projection of
the output. Each compresses its own tokens with copies of the other layers, and gathers the
compressed tokens of all (`MLASelfAttention` of Megatron-LM core_v0.15.0,
megatron/core/transformer/multi_latent_attention.py, whose down projections are `duplicated`).
Layers that expand, with rotations, may run again before the backward of attention
(`qkv_up_checkpoint` of the same class in August 2026, d98e8a64).
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
from zsim.strategy.execution import Recomputed


def latent_attention(size: Size, source: Value, target: Value, name: str) -> tuple[Stretch, ...]:
    """Return latent attention of the block `name`."""
    latent = size.shape.latent
    assert latent is not None
    low = _Compressed(size.of_own_tokens, latent, source, name)
    expanded = _Expanded(size, low, target)
    ups, attend = (expanded.queries(), expanded.keys()), expanded.attend()
    again = (*ups, *attend[:2])  # with rotations
    if not size.cut:
        operators = _dropped(size, (*low.queries(), ups[0], *low.keys(), ups[1], *attend), again)
        return (Stretch(inputs=(source.name,), outputs=(target,), operators=operators),)
    made = low.values(sharded=size.sequence)
    read = [each.name for each in made]
    return (
        Stretch(
            inputs=(source.name,),
            outputs=made,
            operators=(*low.queries(), *low.keys(), low.separate_positions()),
        ),
        Stretch(
            inputs=(*(() if latent.query_rank is not None else (source.name,)), *read),
            outputs=(target,),
            operators=_dropped(size, (*ups, *attend), again),
            begins=size.token_gather,
            ends=size.token_sum,
        ),
    )


def _dropped(
    size: Size, operators: tuple[Operator, ...], again: tuple[Operator, ...]
) -> tuple[Operator, ...]:
    """Return `operators`; those in `again` may run again in backward, and keep nothing."""
    if Recomputed.LATENT not in size.shape.execution.recomputes:
        return operators
    from zsim.model.transformer.recomputed_parts import recomputed  # noqa: PLC0415 (rare)

    return recomputed(operators, again)


class _Compressed:
    """Compressed queries, keys and values of a rank's own tokens, which the heads expand.

    Attributes:
        normed_queries: the normed queries, or the hidden state if queries are not compressed.
        joined: keys and values, and the elements of keys that have positions.
        normed: the normed keys and values.
        positions: the elements with positions, if they are separate.
    """

    def __init__(self, size: Size, latent: Latent, source: Value, name: str) -> None:
        self.size, self.latent, self.name = size, latent, name
        self.read = self.normed_queries = size.whole(source)
        if latent.query_rank is not None:
            self.normed_queries = size.rows(f"{name}/q_a/normed", latent.query_rank)
        self.joined = size.rows(f"{name}/kv_a", latent.key_value_rank + latent.rope_size)
        self.normed = size.rows(f"{name}/kv_a/normed", latent.key_value_rank)
        self.positions = size.rows(f"{name}/kv_a/positions", latent.rope_size)

    def values(self, *, sharded: bool) -> tuple[Value, ...]:
        """Return the values that all ranks of a tensor axis read."""
        own = () if self.latent.query_rank is None else (self.normed_queries,)
        return tuple(
            Value(name=each.name, elements=each.elements, dtype=each.dtype, tensor_sharded=sharded)
            for each in (*own, self.normed, self.positions)
        )

    def queries(self) -> tuple[Operator, ...]:
        """Return the layer that compresses queries and its norm; empty if they are not."""
        rank = self.latent.query_rank
        if rank is None:
            return ()
        low = self.size.rows(f"{self.name}/q_a", rank)
        return (
            self._layer(low, f"{self.name}.q_a"),
            normalize(self.size, low, self.normed_queries, f"{self.name}.ln_q", width=rank),
        )

    def keys(self) -> tuple[Operator, ...]:
        """Return the layer that compresses keys and values, and the norm of its first elements."""
        rank = self.latent.key_value_rank
        part = self.size.rows(self.joined.name, rank)  # a view of the first elements of each row
        norm = normalize(self.size, part, self.normed, f"{self.name}.ln_kv", width=rank)
        kept = tuple(self.joined if each == part else each for each in norm.saves)
        return (
            self._layer(self.joined, f"{self.name}.kv_a"),
            replace(norm, reads=(self.joined,), saves=kept),
        )

    def separate_positions(self) -> Operator:
        """Return the copy of the elements with positions, which ranks gather."""
        shape = (self.size.tokens, self.latent.rope_size)

        def kernel(*, backward: bool) -> Kernel:
            kind = KernelKind.ELEMENTWISE
            return streaming(kind, shape, self.size.dtype, streams=2, backward=backward)

        return Operator(
            reads=(self.joined,),
            makes=self.positions,
            forward=(kernel(backward=False),),
            backward=(kernel(backward=True),),
        )

    def _layer(self, target: Tensor, name: str) -> Operator:
        return _layer(self.size, self.read, target, name, whole=True, biased=self.latent.bias)


class _Expanded:
    """The parts of the heads of a rank, from compressed tokens of all ranks to `target`."""

    def __init__(self, size: Size, low: _Compressed, target: Value) -> None:
        self.size, self.low, self.latent, self.target = size, low, low.latent, target
        name, heads, latent = low.name, size.heads, low.latent
        self._queries = size.rows(f"{name}/queries", heads * latent.head_size)
        self._keys = size.rows(f"{name}/kv_b", heads * (latent.nope_size + latent.value_size))

    def queries(self) -> Operator:
        """Return the layer that makes queries."""
        layer = "q" if self.latent.query_rank is None else "q_b"
        return self._expand(self.low.normed_queries, self._queries, layer)

    def keys(self) -> Operator:
        """Return the layer that makes keys without positions, and values."""
        return self._expand(self.low.normed, self._keys, "kv_b")

    def attend(self) -> tuple[Operator, ...]:
        """Return rotations, attention, and the projection of its output."""
        size, latent, name, heads = self.size, self.latent, self.low.name, self.size.heads
        keys = size.rows(f"{name}/keys", heads * latent.head_size)
        turned = size.rows(f"{name}/queries/turned", heads * latent.head_size)
        attended = size.rows(f"{name}/attended", heads * latent.value_size)
        positions = _of_all(size, self.low.positions) if size.cut else self.low.joined
        return (
            _turn(size, (self._queries,), turned, moved=2 * turned.elements),
            _turn(
                size,
                (self._keys, positions),
                keys,
                moved=size.tokens * (heads * latent.nope_size + latent.rope_size) + keys.elements,
            ),
            _attend(size, (turned, keys, self._keys), attended, name),
            _layer(size, attended, size.whole(self.target), f"{name}.proj"),
        )

    def _expand(self, source: Tensor, target: Tensor, layer: str) -> Operator:
        size, read = self.size, _of_all(self.size, source)
        is_kept = size.cut and size.sequence and size.keeps_gathered
        kept = replace(read, name=f"{read.name}/whole") if is_kept else None
        return _layer(size, read, target, f"{self.low.name}.{layer}", kept=kept)


def _of_all(size: Size, own: Tensor) -> Tensor:
    """Return the tensor of the tokens of all ranks; `own` is the tensor of one rank."""
    return replace(own, elements=own.elements * size.tokens // size.own_tokens)


def _layer(
    size: Size,
    source: Tensor,
    target: Tensor,
    name: str,
    *,
    whole: bool = False,
    biased: bool = False,
    kept: Tensor | None = None,
) -> Operator:
    """Return the linear layer `name`, in the format of the linear layers of blocks.

    If it is `whole`, ranks of the tensor axis hold copies of it, else parts.
    """
    rows, columns = (each.elements // size.tokens for each in (target, source))
    held = size.copied if whole else size.part
    weight = replace(
        held(f"{name}.weight", rows, columns), float8=size.shape.execution.float8_gathers
    )
    bias = held(f"{name}.bias", rows) if biased else None
    return linear(size, source, target, weight, bias=bias, narrow=size.narrow, kept=kept)


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
