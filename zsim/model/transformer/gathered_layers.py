"""Linear layers that gather their input, and copies around collectives along tokens.

With hidden states sharded by tokens, either attention and MLP gather their input once for all
linear layers that read it, or each layer gathers it: DTensor's `ColwiseParallel` gathers the input
of its module, and scatters its gradient, for each module (torch 2.13, `_prepare_input_fn`,
torch/distributed/tensor/parallel/style.py). If a block is compiled, equal gathers are merged
(`fx_graph_cse`, torch/_functorch/compile_utils.py); gradients differ, and each is scattered.

Collectives work along the first axis, and tokens are the second, after sequences. A copy reorders a
tensor gathered from several sequences, and any tensor that is to be scattered
(`all_gather_single`, `_maybe_view_chunk_cat` and `reduce_scatter_single`, torch 2.13,
torch/distributed/_functional_collectives.py).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from zsim.dtype import DType
from zsim.model.kernel import FusedPart, Kernel, KernelKind, streaming
from zsim.model.model import Value
from zsim.model.segment_exchange import gather_tokens, is_narrow
from zsim.model.transformer.operator import Operator, Stretch
from zsim.model.transformer.size import Size
from zsim.strategy.execution import TokenFusion


def each_gathered(
    size: Size, source: Value, layers: Collection[Sequence[Operator]]
) -> tuple[Stretch, ...]:
    """Return one stretch per layer, which gathers `source` for the layer's operators.

    The last operator computes the output of the layer.
    """
    kept, found = size.kept_in_block(source), list[Stretch]()
    shares = size.shape.execution.compiled
    for number, operators in enumerate(layers):
        own = tuple(operators)
        if shares and number:  # the first layer has saved it for all
            own = tuple(
                replace(each, saves=tuple(saved for saved in each.saves if saved != kept))
                for each in own
            )
        made = own[-1].makes
        output = Value(name=made.name, elements=made.elements, dtype=made.dtype)
        found.append(
            Stretch(
                inputs=(source.name,),
                outputs=(output,),
                operators=own,
                begins=gather_tokens(
                    narrow=size.float8_tokens, stays=shares and number < len(layers) - 1
                ),
            )
        )
    return tuple(found)


def rearranged(size: Size, stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Return stretches with the copies that their collectives along tokens need."""
    found, is_left = list[Stretch](), False
    for each in stretches:
        if size.fused_by is TokenFusion.COMPILER and _has_parts(each):
            found.append(_fused(size, each))
        else:
            found.append(_rearranged(size, each, is_left=is_left) if size.rearranges else each)
        is_left = each.begins is not None and each.begins.stays
    return tuple(found)


def _has_parts(stretch: Stretch) -> bool:
    return any(kernel.part for each in stretch.operators for kernel in each.forward)


def _rearranged(size: Size, stretch: Stretch, *, is_left: bool) -> Stretch:
    first = stretch.operators[0]
    several = size.sequences > 1
    gathered = DType.FP8 if is_narrow(stretch.begins, stretch.ends) else size.dtype
    before = [_copy(size, gathered)] * (stretch.sums_gradients and several and not is_left)
    # of the gradient; and of the input, if it was not kept whole
    after = [_copy(size, size.dtype, backward=True)] * stretch.sums_gradients
    saved = {tensor.name for each in stretch.operators for tensor in each.saves}
    if several and stretch.sums_gradients and stretch.inputs[0] in saved:
        after.append(_copy(size, gathered))
    if stretch.sums_gradients:
        first = replace(
            first, forward=(*before, *first.forward), backward=(*first.backward, *after)
        )
    operators = (first, *stretch.operators[1:])
    if stretch.ends is not None and stretch.outputs[0].tensor_sharded:
        last = operators[-1]
        whole = [_copy(size, gathered, backward=True)] * several
        last = replace(
            last,
            forward=(*last.forward, _copy(size, size.dtype)),
            backward=(*whole, *last.backward),
        )
        operators = (*operators[:-1], last)
    return replace(stretch, operators=operators)


def _fused(size: Size, stretch: Stretch) -> Stretch:
    """Return a stretch whose products are fused with its collectives, including their copies.

    A gather in parts copies a rank's own tokens next to those of other ranks, if other operators
    than the product read them (`ag_out_needed` of `_pipelined_multi_all_gather_and_consume`).
    Received terms are stored by rank, and summed in one kernel
    (`_fused_matmul_reduce_scatter_impl`). With several sequences, the weight gradient product needs
    tokens in order, so they are copied. The attention output is copied too, since the product after
    it reads it by rank (`restride_A_for_fused_matmul_reduce_scatter`, all torch 2.13,
    torch/distributed/_symmetric_memory/__init__.py).
    """
    gathered = DType.FP8 if is_narrow(stretch.begins, stretch.ends) else size.dtype
    operators, several = list(stretch.operators), size.fuses_gathers
    if stretch.sums_gradients:
        first = operators[0]
        after = [_copy(size, size.dtype, backward=True)]  # of the gradient, which is not fused
        after += [_copy(size, gathered, backward=True)] * several
        operators[0] = replace(
            first,
            forward=(
                *first.forward,
                *[_own_copy(size, gathered)] * (several and size.keeps_gathered),
            ),
            backward=(*first.backward, *after),
        )
    if stretch.ends is not None:
        last, own = operators[-1], (size.own_tokens, size.hidden)
        is_attended = operators[-2].forward[-1].kind is KernelKind.ATTENTION
        read = (size.tokens, last.reads[0].elements // size.tokens)
        before = [streaming(KernelKind.ELEMENTWISE, read, size.dtype, streams=2)]
        kind, streams = KernelKind.ELEMENTWISE, size.tensor + 1
        added = replace(streaming(kind, own, size.dtype, streams=streams), part=FusedPart.SUM)
        own_copy = _own_copy(size, gathered, backward=True)
        whole = [own_copy, _copy(size, gathered, backward=True)] * several
        operators[-1] = replace(
            last,
            forward=(*before * (several and is_attended), *last.forward, added),
            backward=(*last.backward, *whole),
        )
    return replace(stretch, operators=tuple(operators))


def _own_copy(size: Size, dtype: DType, *, backward: bool = False) -> Kernel:
    """Return the copy of the hidden states of a rank's own tokens."""
    shape = (size.own_tokens, size.hidden)
    return streaming(KernelKind.ELEMENTWISE, shape, dtype, streams=2, backward=backward)


def _copy(size: Size, dtype: DType, *, backward: bool = False) -> Kernel:
    """Return the copy of the hidden states of all tokens."""
    shape = (size.tokens, size.hidden)
    return streaming(KernelKind.ELEMENTWISE, shape, dtype, streams=2, backward=backward)
