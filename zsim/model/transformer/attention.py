"""Self-attention: queries, keys and values, scores and their softmax, the output projection."""

from collections.abc import Mapping

from zsim.dtype import DType
from zsim.model.architecture import Attention, Positions, QKNorm
from zsim.model.generator import Draws
from zsim.model.kernel import (
    Kernel,
    KernelKind,
    OperandLayout,
    dropout,
    flash_attention,
    matmul,
    streaming,
)
from zsim.model.model import Value
from zsim.model.transformer.gathered_layers import each_gathered
from zsim.model.transformer.latent import latent_attention
from zsim.model.transformer.linear import column_sum, layer, normalize
from zsim.model.transformer.operator import Operator, Stretch, Tensor
from zsim.model.transformer.shared_attention import shared
from zsim.model.transformer.size import Size


def attention(
    size: Size, source: Value, target: Value, name: str, *, local: bool = False
) -> tuple[Stretch, ...]:
    """Return attention of the block `name`; the residual sum adds the bias of its output.

    If `local`, tokens see only the window; plain attention computes and masks the rest. If ranks
    share a sequence, attention is cut where they exchange keys and values.
    """
    if size.shape.latent is not None:
        return latent_attention(size, source, target, name)
    attended = size.rows(f"{name}/attended", size.query_width)
    layers = _projections(size, source, name)
    projected = {part: operators[-1].makes for part, operators in layers.items()}
    operators = tuple(each for layer in layers.values() for each in layer)
    if size.shape.execution.context > 1:
        rotary, turned = _turned(size, projected)
        return shared(size, (source, target), name, (*operators, *rotary), turned=turned)
    core = (
        *attend(size, projected, attended, name, local=local),
        *layer(size, attended, size.whole(target), f"{name}.proj", scatters=True),
    )
    if size.gathers_each:
        rest = Stretch(
            inputs=tuple(each.name for each in projected.values()),
            outputs=(target,),
            operators=core,
            ends=size.token_sum,
        )
        return (*each_gathered(size, source, layers.values()), rest)
    whole = Stretch(
        inputs=(source.name,),
        outputs=(target,),
        operators=(*operators, *core),
        begins=size.token_gather,
        ends=size.token_sum,
    )
    return (whole,)


def attend(
    size: Size, projected: Mapping[str, Tensor], target: Tensor, name: str, *, local: bool = False
) -> tuple[Operator, ...]:
    """Return the operators that compute `target` from `projected` linear layers, by name."""
    rotary, turned = _turned(size, projected)
    if size.shape.attention is Attention.PLAIN:
        return (*rotary, _plain(size, turned, target, name))
    window = size.shape.window if local else None
    if size.shape.execution.repeats_keys and size.shape.joined_qkv:
        (joined,) = projected.values()
        apart, read = _apart(size, joined)
        return (apart, _flash(size, read, target, name, window=window or 0))
    copies: tuple[Operator, ...] = ()
    if size.shape.execution.repeats_keys and size.heads > size.shared_heads and len(turned) > 1:
        copies = tuple(_repeated(size, each) for each in turned[1:])
        turned = (turned[0], *(each.makes for each in copies))
    return (*rotary, *copies, _flash(size, turned, target, name, window=window or 0))


def _apart(size: Size, joined: Tensor) -> tuple[Operator, tuple[Tensor, ...]]:
    """Return the operator that rotates heads of a joined layer, and what attention reads.

    Shared keys and values have a copy for each query head; other values are a view of `joined`.
    """
    is_shared = size.heads > size.shared_heads
    width = size.query_width * (3 if is_shared else 2)
    made = size.rows(f"{joined.name}/apart", width)
    shape, kind = (size.tokens, width), KernelKind.ROTARY
    found = Operator(
        reads=(joined,),
        makes=made,
        forward=(streaming(kind, shape, size.dtype, streams=2),),
        backward=(streaming(kind, shape, size.dtype, streams=2, backward=True),),
    )
    return found, (made,) if is_shared else (made, joined)


def _turned(
    size: Size, projected: Mapping[str, Tensor]
) -> tuple[tuple[Operator, ...], tuple[Tensor, ...]]:
    """Return the rotary operators, if positions are rotary, and the tensors attention reads."""
    if size.shape.positions is not Positions.ROTARY:
        return (), tuple(projected.values())
    rotary = tuple(_rotary(size, each) for part, each in projected.items() if part != "v")
    straight = [each for part, each in projected.items() if part == "v"]
    return rotary, (*(each.makes for each in rotary), *straight)


def projections(size: Size) -> dict[str, int]:
    """Return the widths of the linear layers before attention, by name."""
    queries, keys = size.query_width, size.key_width
    if size.shape.joined_qkv:
        return {"qkv": queries + 2 * keys}
    return {"q": queries, "k": keys, "v": keys}


def _projections(size: Size, source: Value, name: str) -> dict[str, tuple[Operator, ...]]:
    """Return the linear layers before attention by name; the last operator gives the output.

    Tensor ranks hold copies of the norms of heads, whose gradients are summed over the ranks
    (`_allreduce_layernorm_grads` of Megatron-LM, megatron/core/distributed/finalize_model_grads.py,
    for names with `q_layernorm` and `k_layernorm`; `NoParallel` of `attention.q_norm` in
    `apply_non_moe_tp` of torchtitan, torchtitan/models/qwen3/infra/parallelize.py).
    """
    found: dict[str, tuple[Operator, ...]] = {}
    whole, kept, biased = size.whole(source), size.kept_in_block(source), size.shape.biased_qkv
    for part, width in projections(size).items():
        target = size.rows(f"{name}/{part}", width)
        found[part] = layer(
            size,
            whole,
            target,
            f"{name}.{part}",
            biased=biased,
            kept=kept,
            shares=bool(found),
        )
        if size.shape.qk_norm is not None and part != "v":
            by_head = size.shape.qk_norm is not QKNorm.WIDTH
            normed = size.rows(f"{name}/{part}/normed", width)
            turned = normalize(
                size,
                target,
                normed,
                f"{name}.ln_{part}",
                width=size.shape.head_width if by_head else width,
                of_own_heads=by_head,
                scaled=size.shape.qk_norm is not QKNorm.UNSCALED,
            )
            found[part] = (*found[part], turned)
    return found


def _repeated(size: Size, source: Tensor) -> Operator:
    """Return the copies of keys or values for each query head (`repeat_kv`)."""
    target = size.rows(f"{source.name}/repeated", size.query_width)
    moved = (source.elements + target.elements) * size.dtype.size_bytes
    forward, backward = (
        Kernel(
            kind=KernelKind.ELEMENTWISE,
            flops=target.elements,
            bytes=moved,
            dtype=size.dtype,
            shape=(size.tokens, size.query_width),
            backward=way,
        )
        for way in (False, True)
    )
    return Operator(reads=(source,), makes=target, forward=(forward,), backward=(backward,))


BytesOfKernels = tuple[tuple[int, ...], tuple[int, ...]]
"""Bytes of an element of bf16 that kernels of `apply_rotary_emb` read and write, each way."""
COMPLEX: BytesOfKernels = ((6, 8, 6), (6, 8, 6))
"""Cast to fp32, product of complex numbers, cast back; backward is alike (torchtitan,
torchtitan/models/llama3/model/model.py at d9bdfbb2)."""
HALVES: BytesOfKernels = ((2, 4, 4, 4, 6), (4, 4, 2, 2, 2, 2, 2, 6, 6))
"""Half negated and joined to the other half, two products, their sum. Backward: the products, the
negation, each half put into zeros, two sums (torchtitan, experiments/qwen3/model/model.py at
d66b72a6)."""


def _written(size: Size, source: Tensor, target: Tensor) -> Operator:
    """Return the rotation in the operators of torchtitan: in halves if heads are normed (Qwen 3).

    Bytes of other formats are in proportion, but fp32 needs no casts.
    """
    moved = HALVES if size.shape.qk_norm is QKNorm.HEAD else COMPLEX
    if moved is COMPLEX and size.dtype is size.wide:
        moved = ((16,), (16,))
    shape = (size.tokens, source.elements // size.tokens)
    scale = size.dtype.size_bytes if moved is HALVES else size.wide.size_bytes // 2

    def kernels(counts: tuple[int, ...], *, backward: bool) -> tuple[Kernel, ...]:
        return tuple(
            Kernel(
                kind=KernelKind.ELEMENTWISE,
                flops=source.elements,
                bytes=source.elements * count * scale // 2,
                dtype=size.dtype,
                shape=shape,
                backward=backward,
            )
            for count in counts
        )

    return Operator(
        reads=(source,),
        makes=target,
        forward=kernels(moved[0], backward=False),
        backward=kernels(moved[1], backward=True),
    )


def _rotary(size: Size, source: Tensor) -> Operator:
    """Return the rotation of pairs of elements by an angle that depends on the position.

    It is several kernels, unless compiled. If queries, keys and values are one tensor, all of it
    moves through the kernels.
    """
    shape = (size.tokens, source.elements // size.tokens)
    target = Tensor(name=f"{source.name}/turned", elements=source.elements, dtype=source.dtype)
    execution = size.shape.execution
    if execution.writes_rotary and not execution.compiled:
        return _written(size, source, target)
    kind = KernelKind.ELEMENTWISE if size.shape.execution.compiled else KernelKind.ROTARY
    return Operator(
        reads=(source,),
        makes=target,
        forward=(streaming(kind, shape, size.dtype, streams=2),),
        backward=(streaming(kind, shape, size.dtype, streams=2, backward=True),),
    )


def _flash(
    size: Size, sources: tuple[Tensor, ...], target: Tensor, name: str, *, window: int
) -> Operator:
    """Return flash attention: it saves inputs, outputs, and one number per row of scores."""
    shape = (
        size.sequences,
        size.heads,
        size.shared_heads,
        size.length,
        size.shape.sequence_length,
        size.shape.head_width,
    )
    saved = [Tensor(name=f"{name}/sums", elements=size.tokens * size.heads, dtype=size.wide)]
    if size.shape.dropout:  # backward draws the mask again, from the saved state
        saved.append(Tensor(name=f"{name}/state", elements=2, dtype=DType.INT64))
    version = size.shape.attention.version
    forward, backward = (
        flash_attention(shape, size.dtype, backward=way, version=version, window=window)
        for way in (False, True)
    )
    sinks = (size.part(f"{name}.sinks", size.heads),) if size.shape.sinks else ()
    trained = [each for each in sinks if not each.frozen]
    return Operator(
        reads=sources,
        makes=target,
        parameters=sinks,
        saves=(*sources, target, *saved),
        draws=Draws.APART if size.shape.dropout else None,
        forward=(forward,),
        backward=(backward,),
        trains=tuple(column_sum(size, size.heads) for _ in trained),
    )


def _plain(size: Size, sources: tuple[Tensor, ...], target: Tensor, name: str) -> Operator:
    """Return two batched products with the softmax of all scores in between, which is saved.

    With selective recomputation it is not saved: backward starts by recomputing attention.
    """
    count = size.tokens * size.heads * size.length
    weights = Tensor(name=f"{name}/weights", elements=count, dtype=size.dtype)
    kept = [weights]
    if size.shape.dropout:
        kept.append(Tensor(name=f"{name}/mask", elements=count, dtype=DType.INT8))
        kept.append(Tensor(name=f"{name}/dropped", elements=count, dtype=size.dtype))
    area = (size.tokens * size.heads, size.length)
    forward = (
        *_copies_of_heads(size),
        _product(size, OperandLayout.NT, inner=False),
        *_scaled_and_masked(size, area),
        streaming(KernelKind.SOFTMAX, area, size.dtype, streams=2),
        *_dropped(size, area),
        _product(size, OperandLayout.NN, inner=True),
    )
    backward = (
        _product(size, OperandLayout.NT, inner=False, backward=True),  # of the softmax: with values
        _product(size, OperandLayout.TN, inner=True, backward=True),  # of values: with the softmax
        *_dropped(size, area, backward=True),
        streaming(KernelKind.SOFTMAX, area, size.dtype, streams=3, backward=True),
        *_scaled_and_masked(size, area, backward=True),
        _product(size, OperandLayout.NN, inner=True, backward=True),  # of queries: with keys
        _product(size, OperandLayout.TN, inner=True, backward=True),  # of keys: with queries
        *_copies_of_heads(size, backward=True),
    )
    again = size.shape.recompute_attention
    # Scores and their softmax have one gradient each. With recomputation, the softmax and a copy of
    # the keys exist as well.
    keys = size.key_width * size.tokens * size.dtype.size_bytes
    made_again = weights.size_bytes + keys if again else 0
    return Operator(
        reads=sources,
        makes=target,
        forward_scratch=weights.size_bytes * (2 if again else 1),
        backward_scratch=weights.size_bytes * 2 + made_again,
        saves=sources if again else (*sources, *kept),
        draws=Draws.APART if size.shape.dropout else None,
        forward=forward,
        backward=(*forward, *backward) if again else backward,
    )


def _copies_of_heads(size: Size, *, backward: bool = False) -> tuple[Kernel, ...]:
    """Return the copies of queries, keys, values and result by head; none if fused."""
    if size.shape.fused:
        return ()
    widths = (size.query_width, size.key_width, size.key_width, size.query_width)
    return tuple(
        streaming(
            KernelKind.ELEMENTWISE, (size.tokens, width), size.dtype, streams=2, backward=backward
        )
        for width in widths
    )


def _scaled_and_masked(
    size: Size, area: tuple[int, ...], *, backward: bool = False
) -> tuple[Kernel, ...]:
    """Return scale, mask and masked fill of scores; none if fused.

    The masked fill needs no kernel in backward.
    """
    if size.shape.fused:
        return ()
    kernel = streaming(KernelKind.ELEMENTWISE, area, size.dtype, streams=2, backward=backward)
    return (kernel,) * (2 if backward else 3)


def _dropped(size: Size, area: tuple[int, ...], *, backward: bool = False) -> tuple[Kernel, ...]:
    """Return dropout of the softmax; none if fused."""
    return () if size.shape.fused else (dropout(area, size.dtype, backward=backward),)


def _product(size: Size, layout: OperandLayout, *, inner: bool, backward: bool = False) -> Kernel:
    """Return the product of scores from heads, or with `inner` of heads from scores."""
    queries = size.heads // size.shared_heads * size.length
    width, keys = size.shape.head_width, size.length
    return matmul(
        queries,
        width if inner else keys,
        keys if inner else width,
        size.dtype,
        batch=size.sequences * size.shared_heads,
        causal=True,
        backward=backward,
        layout=layout,
    )
