"""Attention of ranks that share a sequence, cut where they exchange keys and values.

Keys and values are concatenated for one exchange, as in PyTorch (`_templated_ring_attention`,
torch 2.13), with the heads that exist before each is repeated for several queries. Every rank has
one part of either half of a sequence (head-tail), so that each has the same number of pairs of
causal attention: half of all pairs for its own tokens; for those of another rank all queries with
half of the keys, or half of the queries with all keys.
"""

from collections.abc import Sequence
from dataclasses import replace

from zsim.dtype import DType
from zsim.model.generator import Draws
from zsim.model.kernel import Kernel, KernelKind, flash_attention, streaming
from zsim.model.model import Value
from zsim.model.segment_exchange import GATHER_SEQUENCE, pass_along
from zsim.model.transformer.linear import layer
from zsim.model.transformer.operator import Operator, Stretch, Tensor, tensor_of
from zsim.model.transformer.size import Size
from zsim.strategy.execution import ContextExchange


def shared(
    size: Size,
    ends: tuple[Value, Value],
    name: str,
    operators: Sequence[Operator],
    *,
    turned: Sequence[Tensor],
) -> tuple[Stretch, ...]:
    """Return the stretches of attention from the first of `ends` to the second.

    The first value covers a rank's own tokens. `operators` compute the inputs of attention,
    `turned`.
    """
    source, target = ends
    queries = _flow(size, f"{name}/queries", size.query_width)
    keys = _flow(size, f"{name}/keys", 2 * size.key_width)
    first = Stretch(
        inputs=(source.name,),
        outputs=(queries, keys),
        operators=_packed(size, operators, turned, (queries, keys)),
        begins=size.token_gather,
    )
    attended = size.rows(f"{name}/attended", size.query_width)
    if size.shape.execution.exchange is ContextExchange.RING:
        *parts, last = _ring(size, (queries, keys), name, attended)
    else:
        parts, last = [], _gathered(size, (queries, keys), name, attended)
    projected = layer(size, attended, size.whole(target), f"{name}.proj", scatters=True)
    last = replace(
        last,
        outputs=(target,),
        operators=(*last.operators, *projected),
        ends=size.token_sum,
    )
    return (first, *parts, last)


def _packed(
    size: Size,
    operators: Sequence[Operator],
    turned: Sequence[Tensor],
    flows: tuple[Value, Value],
) -> tuple[Operator, ...]:
    """Return operators that compute queries, and keys and values in one tensor."""
    queries, keys = flows
    made, given = list(operators), list(turned)
    copied = [keys]
    if size.shape.joined_qkv:
        copied.insert(0, queries)
    else:  # queries are a separate tensor, which is passed on under their name
        own = given.pop(0)
        made = [
            replace(each, makes=tensor_of(queries)) if each.makes == own else each for each in made
        ]
    for value in copied:
        shape = (size.tokens, value.elements // size.tokens)
        kernel = streaming(KernelKind.ELEMENTWISE, shape, size.dtype, streams=2)
        made.append(Operator(reads=tuple(given), makes=tensor_of(value), forward=(kernel,)))
    return tuple(made)


def _flow(size: Size, name: str, width: int) -> Value:
    """Return a value of `width` elements per token."""
    return Value(name=name, elements=size.tokens * width, dtype=size.dtype)


def _sums(size: Size, name: str) -> Tensor:
    """Return the number per row of scores that flash attention saves."""
    return Tensor(name=f"{name}/sums", elements=size.tokens * size.heads, dtype=size.wide)


def _state(size: Size, name: str) -> tuple[Tensor, ...]:
    """Return the state from which backward draws the mask of scores again, if there is one."""
    if not size.shape.dropout:
        return ()
    return (Tensor(name=f"{name}/state", elements=2, dtype=DType.INT64),)


def _kernel(size: Size, keys: int, *, backward: bool) -> Kernel:
    """Return attention of a rank's queries to `keys` keys; half of its scores are masked."""
    shape = (
        size.sequences,
        size.heads,
        size.shared_heads,
        size.length,
        keys,
        size.shape.head_width,
    )
    version = size.shape.attention.version
    return flash_attention(shape, size.dtype, backward=backward, version=version)


def _gathered(size: Size, flows: tuple[Value, Value], name: str, attended: Tensor) -> Stretch:
    """Return attention to the keys of all ranks at once."""
    queries, keys = flows
    ranks, merges = size.shape.execution.context, size.shape.execution.merges
    whole = Tensor(name=keys.name, elements=ranks * keys.elements, dtype=keys.dtype)
    read, wide = (tensor_of(queries), whole), size.wide
    parts = [size.length] * ranks if merges else [size.shape.sequence_length]
    forward = [_kernel(size, length, backward=False) for length in parts]
    if merges:
        for offset in range(ranks):
            forward += _merging(size, merges=offset > 0, is_last=offset == ranks - 1)
    attend = Operator(
        reads=read,
        makes=attended,
        saves=(*read, attended, _sums(size, name), *_state(size, name)),
        draws=Draws.APART if size.shape.dropout else None,
        # the result so far, that of one rank, and their difference
        forward_scratch=3 * attended.elements * wide.size_bytes if merges else 0,
        forward=tuple(forward),
        backward=tuple(_kernel(size, length, backward=True) for length in parts),
    )
    return Stretch(
        inputs=(queries.name, keys.name), outputs=(), operators=(attend,), begins=GATHER_SEQUENCE
    )


def _ring(size: Size, flows: tuple[Value, Value], name: str, attended: Tensor) -> list[Stretch]:
    """Return attention to the keys of one rank at a time, its own first.

    Results are merged in fp32, with the log-sums of their rows. Backward of each part reads only
    the final result, not the result so far or the part's own
    (`_templated_ring_attention_backward`, torch 2.13); here the last part saves it.
    """
    queries, keys = flows
    found: list[Stretch] = []
    before: tuple[Value, ...] = ()
    ranks = size.shape.execution.context
    for offset in range(ranks):
        width = size.query_width + size.heads
        made = Value(name=f"{name}/attended{offset}", elements=size.tokens * width, dtype=size.wide)
        is_last = offset == ranks - 1
        read = (tensor_of(queries), tensor_of(keys))
        attend = Operator(
            reads=(*map(tensor_of, before), *read),
            makes=attended if is_last else tensor_of(made),
            saves=(
                *read,
                *((attended, _sums(size, name)) if is_last else ()),
                *_state(size, f"{name}/{offset}"),
            ),
            draws=Draws.APART if size.shape.dropout else None,
            forward=(
                _kernel(size, size.length, backward=False),
                *_merging(size, merges=offset > 0, is_last=is_last),
            ),
            backward=(_kernel(size, size.length, backward=True),),
        )
        found.append(
            Stretch(
                inputs=(*(each.name for each in before), queries.name, keys.name),
                outputs=(made,),
                operators=(attend,),
                begins=pass_along(offset),
                adds=offset > 0,
            )
        )
        before = (made,)
    return found


def _merging(size: Size, *, merges: bool, is_last: bool) -> tuple[Kernel, ...]:
    """Return the kernels that merge a result in fp32 into the one so far.

    As in `_SDPAMerger`, torch 2.13: the result is cast. The difference from the result so far, its
    product with a weight per row, and the subtraction of this product are one kernel each. The last
    merge casts back.
    """
    shape = (size.tokens, size.query_width)
    streams = (2, *((3, 2, 3) if merges else ()), *((2,) if is_last else ()))
    return tuple(
        streaming(KernelKind.ELEMENTWISE, shape, size.wide, streams=each) for each in streams
    )
