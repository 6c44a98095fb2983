"""Prediction of further tokens (MTP): a block after the last one for each further token.

DeepSeek-AI 2024, "DeepSeek-V3", section 2.2: the hidden state and the embedding of the next token
are normed, joined and projected to the hidden size; a block follows, then the norm and the loss of
the head. It shares the embedding and the output projection of the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zsim.model.kernel import KernelKind, streaming
from zsim.model.model import BATCH, Unit, Value
from zsim.model.transformer.block import between_exchanges, one_after_the_other
from zsim.model.transformer.ends import TOKENS, projection, scores
from zsim.model.transformer.linear import linear, normalize
from zsim.model.transformer.operator import (
    Operator,
    Stretch,
    Tensor,
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
        source = made[-1].segments[-1].outputs[0]
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
    stretches = (
        _joined_input(size, name, source, projected),
        *block,
        _loss(size, name, output, loss),
    )
    parts = between_exchanges(stretches, (output.name, loss.name))
    return Unit(
        name=name,
        parameters=parameters_of(stretches),
        segments=segments(parts, (source, batch), size.shape.execution),
        checkpoint=False,
    )


def _joined_input(size: Size, name: str, source: Value, target: Value) -> Stretch:
    """Return the projection of a hidden state and the embedding of the next token."""
    area, dtype = (size.tokens, size.hidden), size.dtype
    words, normed, embedded = (
        size.rows(f"{name}/{part}", size.hidden) for part in ("words", "hidden", "embedded")
    )
    both = size.rows(f"{name}/both", 2 * size.hidden)
    table = size.part(TOKENS, size.shape.vocab_size, size.hidden)
    kind = KernelKind.EMBEDDING
    weight = size.copied(f"{name}.projection.weight", size.hidden, 2 * size.hidden)
    wide = (size.tokens, 2 * size.hidden)
    return Stretch(
        inputs=(source.name, BATCH),
        outputs=(target,),
        operators=(
            Operator(
                reads=(),
                makes=words,
                parameters=(table,),
                forward=(streaming(kind, area, dtype, streams=2),),
                trains=()
                if table.frozen
                else (streaming(kind, area, dtype, streams=2, backward=True),),
            ),
            normalize(size, words, embedded, f"{name}.ln_embedding"),
            normalize(size, tensor_of(source), normed, f"{name}.ln_hidden"),
            Operator(
                reads=(embedded, normed),
                makes=both,
                forward=(streaming(KernelKind.ELEMENTWISE, wide, dtype, streams=2),),
                backward=(
                    streaming(KernelKind.ELEMENTWISE, wide, dtype, streams=2, backward=True),
                ),
            ),
            linear(size, both, tensor_of(target), weight),
        ),
    )


def _loss(size: Size, name: str, source: Value, loss: Value) -> Stretch:
    """Return the norm, the logits of the head, and their loss."""
    normed = size.value(f"{name}/ln")
    norm = normalize(size, tensor_of(source), tensor_of(normed), f"{name}.ln")
    made = scores(size, normed, projection(size), tensor_of(loss))
    return Stretch(
        inputs=(source.name, BATCH),
        outputs=(loss,),
        operators=(norm, *(_renamed(each, name) for each in made)),
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
