"""Prediction of further tokens (MTP): a block after the last one for each further token.

DeepSeek-AI 2024, "DeepSeek-V3", section 2.2: the hidden state and the embedding of the next token
are normed, joined and projected to the hidden size; a block follows, then the norm and the loss of
the head. It shares the embedding and the output projection of the model.

With tensor ranks, each holds columns of the projection, whose input tokens are gathered.
Megatron-LM gathers the columns of all tokens, and a rank keeps its tokens (`_concat_embeddings` of
megatron/core/transformer/multi_token_prediction.py in August 2026, d98e8a64). Here the columns are
partial sums, zero elsewhere, which a reduce-scatter of the same volume adds up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zsim.model.kernel import KernelKind, streaming
from zsim.model.model import BATCH, Unit, Value
from zsim.model.segment_exchange import gather_tokens, sum_outputs
from zsim.model.transformer.block import between_exchanges, one_after_the_other
from zsim.model.transformer.ends import TOKENS, combined_loss, projection, scores
from zsim.model.transformer.gathered_layers import rearranged
from zsim.model.transformer.linear import linear, normalize
from zsim.model.transformer.operator import (
    Operator,
    Stretch,
    Tensor,
    joined,
    parameters_of,
    tensor_of,
)
from zsim.model.transformer.segment import segments
from zsim.model.transformer.size import Size


def further_tokens(size: Size, source: Value, batch: Value) -> list[Unit]:
    """Return the units that predict further tokens from the output of the last block, `source`."""
    made: list[Unit] = []
    for depth in range(size.shape.mtp_layers):
        made.append(_unit(size, f"mtp{depth}", source, batch))
        outputs = (each for part in made[-1].segments for each in part.outputs)
        source = next(each for each in outputs if each.name == f"mtp{depth}/output")
    return made


def _unit(size: Size, name: str, source: Value, batch: Value) -> Unit:
    """Return the unit called `name`: its outputs are a hidden state and a loss."""
    projected, output = size.value(f"{name}/projected"), size.value(f"{name}/output")
    loss = Value(name=f"{name}/loss", elements=1, dtype=size.wide)
    last = size.shape.layers - 1
    block = one_after_the_other(
        size,
        name,
        projected,
        local=size.shape.is_local(last),
        routed=size.shape.has_experts(last),
    )
    stretches: tuple[Stretch, ...] = (
        *_joined_input(size, name, source, projected),
        *block,
        *_loss(size, name, output, loss),
    )
    parameters = parameters_of(stretches)
    if size.cut:
        stretches = rearranged(size, stretches)
    else:
        stretches = between_exchanges(stretches, (output.name, loss.name))
    return Unit(
        name=name,
        parameters=tuple(each for each in parameters if not each.load),
        biases=tuple(each for each in parameters if each.load),
        segments=segments(stretches, (source, batch), size.shape.execution),
        checkpoint=False,
    )


def _joined_input(size: Size, name: str, source: Value, target: Value) -> tuple[Stretch, ...]:
    """Return the projection of a hidden state and the embedding of the next token."""
    words = size.value(f"{name}/words")
    both = size.value(f"{name}/both")
    both = replace(both, elements=2 * both.elements)
    found = (
        Stretch(
            inputs=(BATCH,),
            outputs=(words,),
            operators=(_look_up(size, size.whole(words)),),
            ends=size.token_sum,
        ),
        Stretch(
            inputs=(words.name, source.name),
            outputs=(both,),
            operators=_normed_inputs(size, name, (words, source), both),
        ),
        Stretch(
            inputs=(both.name,),
            outputs=(target,),
            operators=_projected(size, name, both, target),
            begins=size.token_gather,
            ends=size.token_sum,
        ),
    )
    if size.cut:
        return found
    return (replace(joined(found), inputs=(source.name, BATCH)),)


def _look_up(size: Size, target: Tensor) -> Operator:
    """Return the look-up of the embeddings of all tokens in the rank's part of the vocabulary."""
    area, dtype, kind = (size.tokens, size.hidden), size.dtype, KernelKind.EMBEDDING
    table = size.part(TOKENS, size.vocabulary, size.hidden)
    trains = (streaming(kind, area, dtype, streams=2, backward=True),)
    return Operator(
        reads=(),
        makes=target,
        parameters=(table,),
        forward=(streaming(kind, area, dtype, streams=2),),
        trains=() if table.frozen else trains,
    )


def _normed_inputs(
    size: Size, name: str, sources: tuple[Value, Value], target: Value
) -> tuple[Operator, ...]:
    """Return the norms of embedding and hidden state of a rank's own tokens, side by side."""
    words, hidden = map(tensor_of, sources)
    embedded, normed = (tensor_of(size.value(f"{name}/{part}")) for part in ("embedded", "hidden"))
    wide, kind = (size.own_tokens, 2 * size.hidden), KernelKind.ELEMENTWISE
    return (
        normalize(size, words, embedded, f"{name}.ln_embedding"),
        normalize(size, hidden, normed, f"{name}.ln_hidden"),
        Operator(
            reads=(embedded, normed),
            makes=tensor_of(target),
            forward=(streaming(kind, wide, size.dtype, streams=2),),
            backward=(streaming(kind, wide, size.dtype, streams=2, backward=True),),
        ),
    )


def _projected(size: Size, name: str, source: Value, target: Value) -> tuple[Operator, ...]:
    """Return the projection of all tokens to the rank's columns, with zeros in other columns."""
    read = replace(tensor_of(source), elements=2 * size.tokens * size.hidden)
    columns = size.hidden // size.tensor
    weight = size.part(f"{name}.projection.weight", columns, 2 * size.hidden)
    if not size.cut:
        return (linear(size, read, tensor_of(target), weight),)
    own, kind, area = size.rows(f"{name}/columns", columns), KernelKind.ELEMENTWISE, size.tokens
    return (
        linear(size, read, own, weight),
        Operator(
            reads=(own,),
            makes=size.whole(target),
            forward=(streaming(kind, (area, size.hidden), size.dtype, streams=2),),
            backward=(streaming(kind, (area, columns), size.dtype, streams=2, backward=True),),
        ),
    )


def _loss(size: Size, name: str, source: Value, loss: Value) -> tuple[Stretch, ...]:
    """Return the norm, the logits of the head, and their loss."""
    normed = size.value(f"{name}/ln")
    norm = normalize(size, tensor_of(source), tensor_of(normed), f"{name}.ln")
    statistics = replace(loss, name=f"{name}/statistics", elements=3 * size.tokens)
    made = scores(size, normed, projection(size), tensor_of(statistics if size.cut else loss))
    entropy = tuple(_renamed(each, name) for each in made)
    if not size.cut:
        whole = (norm, *entropy)
        return (Stretch(inputs=(source.name, BATCH), outputs=(loss,), operators=whole),)
    return (
        Stretch(inputs=(source.name,), outputs=(normed,), operators=(norm,)),
        Stretch(
            inputs=(normed.name, BATCH),
            outputs=(statistics,),
            operators=entropy,
            begins=gather_tokens(),
            ends=sum_outputs(),
        ),
        combined_loss(size, statistics, loss),
    )


def _renamed(operator: Operator, name: str) -> Operator:
    """Return `operator` of the head with tensors of unit `name`."""

    def own(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(
            replace(each, name=each.name.replace("head/", f"{name}/head/", 1))
            if each.name.startswith("head/")
            else each
            for each in tensors
        )

    (makes,) = own((operator.makes,))
    return replace(operator, reads=own(operator.reads), makes=makes, saves=own(operator.saves))


def with_losses(size: Size, head: Unit, further: Sequence[Unit]) -> Unit:
    """Return `head` with the losses of `further` units added to its own."""
    if not further:
        return head
    *before, last = head.segments
    (loss,) = last.outputs
    own = replace(loss, name="head/next")
    losses = (own, *(unit.segments[-1].outputs[-1] for unit in further))
    add = Operator(
        reads=tuple(map(tensor_of, losses)),
        makes=tensor_of(loss),
        forward=(streaming(KernelKind.ELEMENTWISE, (1,), size.wide, streams=3),),
        backward=(streaming(KernelKind.ELEMENTWISE, (1,), size.wide, streams=2, backward=True),),
    )
    stretch = Stretch(inputs=tuple(each.name for each in losses), outputs=(loss,), operators=(add,))
    sums = segments((stretch,), losses)
    return replace(head, segments=(*before, replace(last, outputs=(own,)), *sums))
