"""The units before and after the blocks: the embedding, and the head with the loss."""

from dataclasses import replace

from zsim.dtype import DType
from zsim.model.architecture import HEAD
from zsim.model.kernel import Kernel, KernelKind, streaming
from zsim.model.model import BATCH, Parameter, Unit, Value
from zsim.model.segment_exchange import GATHER_ALIKE, gather_tokens, sum_outputs
from zsim.model.transformer.gathered_layers import rearranged
from zsim.model.transformer.linear import linear, normalize
from zsim.model.transformer.operator import Operator, Stretch, Tensor, joined, tensor_of
from zsim.model.transformer.overlapped_layers import beside_nccl
from zsim.model.transformer.segment import segments
from zsim.model.transformer.size import Size
from zsim.strategy.execution import Loss

HEAD_TOKENS = 128
"""Tokens of a sequence in a chunk of the head and its loss (LitGPT, `lm_head_chunk_size`)."""

LOSS_CHUNKS = 8
"""Number of chunks of tokens of a micro-batch in a chunked loss (torchtitan, `num_chunks`)."""

TOKENS = "embedding.token.weight"
PLACES = "embedding.position.weight"


def embedding(size: Size, batch: Value) -> Unit:
    """Return the token embedding, plus that of positions if these are learned.

    With a tensor axis, each rank looks up the tokens of its rows, and the result is summed over
    ranks. Alternatively each rank has the whole embedding: kernels read rows of all tokens, the
    rank keeps those of its own tokens, and the gradients are summed over ranks. DTensor computes
    the same sum from hidden state gradients that it gathers first. Ranks that share sequences
    first copy their own tokens out of the batch, and save the copy. A norm may follow.
    """
    is_whole = size.replicates_embedding
    made = size.copied if is_whole else size.part
    words = made(TOKENS, size.shape.vocab_size if is_whole else size.vocabulary, size.hidden)
    output = size.value("embedding/sum" if size.shape.embedding_norm else "embedding/output")
    shape, dtype, is_cut = (size.tokens, size.hidden), size.dtype, size.cut and not is_whole
    ends = sum_outputs() if is_cut else None
    found = size.value("embedding/words")
    target = found if size.shape.places else output
    look_up = Operator(
        reads=(),
        makes=tensor_of(target) if is_whole else size.whole(target),
        parameters=(words,),
        saves=(_tokens(size, batch),),
        forward=(streaming(KernelKind.EMBEDDING, shape, dtype, streams=2),),
        trains=(streaming(KernelKind.EMBEDDING, shape, dtype, streams=2, backward=True),),
    )
    if not size.shape.places:
        only = Stretch(inputs=(BATCH,), outputs=(output,), operators=(look_up,), ends=ends)
        return _embedding(size, batch, (words,), (only,))
    places = size.copied(PLACES, size.shape.places, size.hidden)
    sums = streaming(KernelKind.ELEMENTWISE, (size.own_tokens, size.hidden), dtype, streams=1)
    shape = (size.own_tokens, size.hidden)
    add = Operator(
        reads=(tensor_of(found),),
        makes=tensor_of(output),
        saves=size.masks(output),
        shares_gradient=not size.shape.dropout,
        draws=size.draws,
        parameters=(places,),
        forward=(streaming(KernelKind.ELEMENTWISE, shape, dtype, streams=3),),
        trains=() if places.frozen else (replace(sums, backward=True),),
    )
    stretches: tuple[Stretch, ...] = (
        Stretch(inputs=(BATCH,), outputs=(found,), operators=(look_up,), ends=ends),
        Stretch(inputs=(found.name,), outputs=(output,), operators=(add,)),
    )
    if not size.cut:
        stretches = (joined(stretches),)
    return _embedding(size, batch, (words, places), stretches)


def _embedding(
    size: Size, batch: Value, parameters: tuple[Parameter, ...], stretches: tuple[Stretch, ...]
) -> Unit:
    """Return the unit of `stretches`; a norm of their output follows if the shape has one."""
    if size.shape.embedding_norm:
        (found,) = stretches[-1].outputs
        normed = size.value("embedding/output")
        norm = normalize(size, tensor_of(found), tensor_of(normed), "embedding.ln")
        parameters += norm.parameters
        last = Stretch(inputs=(found.name,), outputs=(normed,), operators=(norm,))
        stretches = (*stretches, last) if size.cut else (joined((*stretches, last)),)
    return Unit(
        name="embedding",
        parameters=parameters,
        segments=segments(rearranged(size, stretches), (batch,)),
        checkpoint=False,
    )


def _tokens(size: Size, batch: Value) -> Tensor:
    """Return the tokens to look up: those of the batch, or a copy of a rank's own tokens."""
    if size.shape.execution.context == 1:
        return tensor_of(batch)
    return Tensor(name="embedding/tokens", elements=size.tokens, dtype=batch.dtype)


def head(size: Size, source: Value) -> Unit:
    """Return the head: final norm, logits over the rank's part of the vocabulary, cross entropy.

    As in PyTorch, logits are cast to the format of the loss, in which the log-softmax is saved
    along with the targets. With a tensor axis, the maximum, the sum of exponentials and the
    target's logit of each token are combined over the ranks (Shoeybi et al. 2019, section 3): three
    numbers per token. Saved are the softmax, and for each token its target and whether it is on
    this rank.
    """
    if size.in_place_loss:
        return _vocabulary_parallel(size, source)
    if size.cut and size.shape.execution.gathers_logits:
        return _whole_vocabulary(size, source)
    normed = size.value("head/ln")
    loss = Value(name="head/loss", elements=1, dtype=size.wide)
    norm = normalize(size, tensor_of(source), tensor_of(normed), "head.ln")
    first = Stretch(inputs=(source.name,), outputs=(normed,), operators=(norm,))
    statistics = Value(name="head/statistics", elements=3 * size.tokens, dtype=size.wide)
    last = tensor_of(statistics if size.cut else loss)
    operators = scores(size, normed, projection(size), last)
    own = {each.name: each for operator in operators for each in operator.parameters}
    parameters = (*norm.parameters, *own.values())
    loss_stretch = Stretch(
        inputs=(normed.name, BATCH),
        outputs=(statistics if size.cut else loss,),
        operators=operators,
        ends=sum_outputs() if size.cut else None,
        begins=gather_tokens() if size.cut else None,
    )
    if not size.cut:
        stretches: tuple[Stretch, ...] = (joined((first, loss_stretch)),)
        is_chunked = size.shape.execution.loss in (Loss.CHUNKED_HEAD, Loss.CAST_CHUNKED)
        if size.shape.execution.splits and not is_chunked:
            stretches = _split_loss(size, joined((first, loss_stretch)))
        return Unit(
            name="head",
            parameters=parameters,
            segments=segments(stretches, (source,)),
            checkpoint=False,
        )
    end = combined_loss(size, statistics, loss)
    return Unit(
        name="head",
        parameters=parameters,
        segments=segments(
            rearranged(size, (first, beside_nccl(size, loss_stretch), end)), (source,)
        ),
        checkpoint=False,
    )


def _split_loss(size: Size, whole: Stretch) -> tuple[Stretch, Stretch]:
    """Return the head up to the logits, and the loss, which saves nothing for weight gradients.

    Autograd's graph of weight gradients lives from the last operator with parameters on
    (`stage_backward_input`, torch 2.13, which detaches the loss).
    """
    operators = whole.operators
    place = next(n for n, each in enumerate(operators) if each.makes.name == "head/logits") + 1
    made = operators[place - 1].makes
    logits = Value(name=made.name, elements=made.elements, dtype=made.dtype)
    return (
        replace(whole, inputs=whole.inputs[:-1], outputs=(logits,), operators=operators[:place]),
        Stretch(inputs=(logits.name, BATCH), outputs=whole.outputs, operators=operators[place:]),
    )


def projection(size: Size) -> tuple[Parameter, Parameter | None]:
    """Return the weight of the output projection, and its bias if it has one."""
    name = TOKENS if size.shape.tied_embeddings else "head.weight"
    weight = size.part(name, size.vocabulary, size.hidden)
    return weight, size.part("head.bias", size.vocabulary) if size.shape.head_bias else None


def scores(
    size: Size, normed: Value, projection: tuple[Parameter, Parameter | None], target: Tensor
) -> tuple[Operator, ...]:
    """Return logits and their cross entropy, in the variant that the execution selects."""
    (weight, bias), logits = projection, size.rows("head/logits", size.vocabulary)
    project = linear(size, size.whole(normed), logits, weight, bias=bias, kept=size.kept(normed))
    way = size.shape.execution.loss
    if (lora := size.shape.lora) and (lora.quantizes_head or HEAD in size.shape.adapted):
        from zsim.model.transformer.adapter import adapted_head  # noqa: PLC0415 (only with adapters)

        project = adapted_head(linear, size, project, chunk=_chunk(size, logits))
    if way is Loss.CHUNKED_HEAD:
        return _chunked_head(size, project, target)
    if way is Loss.CAST_CHUNKED:
        return _cast_chunks(size, project, target)
    return (_reporting(size, project), *_entropy(size, logits, target))


def _reporting(size: Size, project: Operator) -> Operator:
    """Return the projection with the kernels of cross entropies computed for metrics.

    They read logits twice and write, as PyTorch's does.
    """
    area = _area(size, project.makes)
    again = streaming(KernelKind.CROSS_ENTROPY, area, size.dtype, streams=3)
    return replace(project, forward=(*project.forward, *[again] * size.shape.execution.metrics))


def _chunk(size: Size, logits: Tensor) -> int:
    """Return the elements of logits that exist at once in addition to the result."""
    if size.shape.execution.loss is not Loss.CAST_CHUNKED:
        return logits.elements
    return logits.elements * min(HEAD_TOKENS, size.length) // size.length


def _area(size: Size, logits: Tensor) -> tuple[int, int]:
    return size.tokens, logits.elements // size.tokens


def _entropy(
    size: Size, logits: Tensor, target: Tensor, *, whole: bool = False
) -> tuple[Operator, ...]:
    """Return the cross entropy of given logits, those of the `whole` vocabulary or a part."""
    way = size.shape.execution.loss
    if way is Loss.CHUNKED:
        return (_chunked_cross_entropy(size, logits, target, whole=whole),)
    if way is Loss.FUSED:
        return (_fused_cross_entropy(size, logits, target),)
    if size.dtype is size.wide or way in (Loss.NARROW, Loss.IN_PLACE):
        return (_cross_entropy(size, logits, target, whole=whole),)
    # The kernels of the cross entropy include the cast.
    wide = replace(logits, name="head/wide", dtype=size.wide)
    cast = Operator(reads=(logits,), makes=wide)
    return cast, _cross_entropy(size, wide, target, whole=whole)


def _whole_vocabulary(size: Size, source: Value) -> Unit:
    """Return the head with gathered logits: every rank computes the loss over all of them.

    A copy orders logits gathered along the last dimension (`all_gather_tensor` of
    `torch.distributed._functional_collectives`), and a rank keeps its own part of the gradient.
    """
    normed = size.value("head/ln")
    own = size.rows("head/logits", size.vocabulary)
    logits = Value(name=own.name, elements=own.elements, dtype=own.dtype, tensor_sharded=True)
    loss = Value(name="head/loss", elements=1, dtype=size.wide)
    norm = normalize(size, tensor_of(source), tensor_of(normed), "head.ln")
    weight, bias = projection(size)
    project = linear(size, size.whole(normed), own, weight, bias=bias, kept=size.kept(normed))
    gathered = replace(own, elements=own.elements * size.tensor)
    ordered = replace(gathered, name="head/ordered")
    order = Operator(
        reads=(gathered,),
        makes=ordered,
        shares_gradient=True,
        forward=(streaming(KernelKind.ELEMENTWISE, _area(size, gathered), size.dtype, streams=2),),
    )
    stretches = (
        Stretch(inputs=(source.name,), outputs=(normed,), operators=(norm,)),
        Stretch(
            inputs=(normed.name,),
            outputs=(logits,),
            operators=(_reporting(size, project),),
            begins=gather_tokens(),
        ),
        Stretch(
            inputs=(logits.name, BATCH),
            outputs=(loss,),
            operators=(order, *_entropy(size, ordered, tensor_of(loss), whole=True)),
            begins=GATHER_ALIKE,
        ),
    )
    return Unit(
        name="head",
        parameters=(*norm.parameters, *project.parameters),
        segments=segments(rearranged(size, stretches), (source,)),
        checkpoint=False,
    )


def _fused_cross_entropy(size: Size, logits: Tensor, target: Tensor) -> Operator:
    """Return cross entropy that saves logits unchanged, and the log-sum-exp of each token.

    Forward reads the logits for their maximum and again for their sum; backward reads them and
    writes their gradient to a new tensor (`inplace_backward` is off by default in
    `flash_attn.losses.cross_entropy`).
    """
    area = _area(size, logits)
    sums = Tensor(name="head/lse", elements=size.tokens, dtype=size.wide)
    targets = Tensor(name="head/targets", elements=size.tokens, dtype=DType.INT64)
    kind = KernelKind.CROSS_ENTROPY
    return Operator(
        reads=(logits,),
        makes=target,
        saves=(logits, sums, targets),
        forward=(streaming(kind, area, size.dtype, streams=2),),
        backward=(streaming(kind, area, size.dtype, streams=2, backward=True),),
    )


def _chunked_cross_entropy(
    size: Size, logits: Tensor, target: Tensor, *, whole: bool = False
) -> Operator:
    """Return cross entropy by chunks; only one chunk's logits are cast, with two gradients.

    The saved tensors of all chunks are allocated and freed as one.
    """
    entropy = _cross_entropy(size, logits, target, whole=whole)
    chunk = logits.elements // LOSS_CHUNKS * size.wide.size_bytes
    return replace(entropy, forward_scratch=chunk, backward_scratch=2 * chunk)


def _chunked_head(size: Size, project: Operator, target: Tensor) -> tuple[Operator, Operator]:
    """Return projection and cross entropy by chunks: forward and then backward of each.

    A chunk needs at once its logits and, in the format of the loss, the log-softmax with its
    gradient and that of the logits. Only the gradient of the hidden state is saved, in the format
    of the loss. Kernels are listed as for autograd; since the loss ends forward, those of backward
    follow it directly in both cases.
    """
    (hidden,) = project.reads
    whole = _cross_entropy(size, project.makes, target)
    logits = replace(project.makes, elements=project.makes.elements // LOSS_CHUNKS)
    gradient = Tensor(name="head/chunked", elements=hidden.elements, dtype=size.wide)
    entropy = Operator(
        reads=(logits,),
        makes=target,
        saves=(gradient,),
        forward_scratch=3 * logits.elements * size.wide.size_bytes,
        forward=whole.forward,
        backward=whole.backward,
    )
    return replace(project, makes=logits), entropy


def _cast_chunks(size: Size, project: Operator, target: Tensor) -> tuple[Operator, ...]:
    """Return projection, cast and cross entropy of one chunk of positions after the other.

    Saved are the log-softmax of all chunks and, if the caller holds them, all cast logits.
    """
    logits = project.makes
    wide = replace(logits, name="head/wide", dtype=size.wide)
    entropy = _cross_entropy(size, wide, target)
    narrow = replace(logits, elements=_chunk(size, logits))
    read = replace(wide, elements=narrow.elements)
    held = (replace(wide, name="head/held"),) if size.shape.execution.holds_logits else ()
    saves = (*(each for each in entropy.saves if each.name != wide.name), *held)
    entropy = replace(entropy, reads=(read,), saves=saves, backward_scratch=read.size_bytes)
    return replace(project, makes=narrow), Operator(reads=(narrow,), makes=read), entropy


def combined_loss(size: Size, statistics: Value, loss: Value) -> Stretch:
    """Return the loss from the statistics of all ranks."""
    sums = (statistics.elements,)
    entropy = Operator(
        reads=(tensor_of(statistics),),
        makes=tensor_of(loss),
        saves=(tensor_of(statistics),),
        forward=(streaming(KernelKind.CROSS_ENTROPY, sums, size.wide, streams=1),),
        backward=(streaming(KernelKind.CROSS_ENTROPY, sums, size.wide, streams=1, backward=True),),
    )
    return Stretch(inputs=(statistics.name,), outputs=(loss,), operators=(entropy,))


def _vocabulary_parallel(size: Size, source: Value) -> Unit:
    """Return the head as separate modules: norm, logits, their cast, loss.

    The caller holds the output of each module while the next one runs, so each is allocated. With
    one rank it is the same without sums.
    """
    normed = size.value("head/ln")
    count = size.tokens * size.vocabulary
    logits = Value(name="head/logits", elements=count, dtype=size.dtype)
    wide = Value(name="head/wide", elements=count, dtype=size.wide)
    loss = Value(name="head/loss", elements=1, dtype=size.wide)
    statistics = Value(name="head/statistics", elements=3 * size.tokens, dtype=size.wide)
    norm = normalize(size, tensor_of(source), tensor_of(normed), "head.ln")
    weight, bias = projection(size)
    source_kept = size.kept(normed)
    project = linear(
        size, size.whole(normed), tensor_of(logits), weight, bias=bias, kept=source_kept
    )
    area = (size.tokens, size.vocabulary)
    widen = Operator(
        reads=(tensor_of(logits),),
        makes=tensor_of(wide),
        forward=(streaming(KernelKind.ELEMENTWISE, area, size.dtype, streams=3),),
        backward=(streaming(KernelKind.ELEMENTWISE, area, size.dtype, streams=3, backward=True),),
    )
    entropy = _cross_entropy(size, tensor_of(wide), tensor_of(statistics))
    stretches = (
        Stretch(inputs=(source.name,), outputs=(normed,), operators=(norm,)),
        Stretch(
            inputs=(normed.name,),
            outputs=(logits,),
            operators=(project,),
            begins=gather_tokens() if size.cut else None,
        ),
        Stretch(inputs=(logits.name,), outputs=(wide,), operators=(widen,)),
        Stretch(
            inputs=(wide.name, BATCH),
            outputs=(statistics,),
            operators=(entropy,),
            ends=sum_outputs() if size.cut else None,
        ),
        combined_loss(size, statistics, loss),
    )
    return Unit(
        name="head",
        parameters=(*norm.parameters, *project.parameters),
        segments=segments(rearranged(size, stretches), (source,)),
        checkpoint=False,
    )


def _cross_entropy(size: Size, logits: Tensor, target: Tensor, *, whole: bool = False) -> Operator:
    """Return cross entropy; forward reads logits twice and writes, backward reads and writes.

    Backward holds two gradients: of the log-softmax, and of the logits, in the wide format unless
    the loss is narrow. In place, the gradient replaces the softmax (Megatron-LM,
    `vocab_parallel_cross_entropy`). Logits that a caller holds count as saved. If composed, forward
    writes logits in the wide format, reads them for their maximum, subtracts, exponentiates, sums
    and subtracts (`_log_softmax`, torch 2.13, torch/distributed/tensor/parallel/loss.py), and
    backward fills, exponentiates, adds, multiplies and casts
    (`_nll_loss_and_log_softmax_backward`): each holds one tensor more than a single kernel.
    """
    own = _area(size, logits)
    dtype = size.dtype if size.shape.execution.loss is Loss.NARROW else size.wide
    kept = Tensor(name="head/softmax", elements=own[0] * own[1], dtype=dtype)
    targets = Tensor(name="head/targets", elements=size.tokens, dtype=DType.INT64)
    if size.cut and not whole:
        last = Tensor(name="head/elsewhere", elements=size.tokens, dtype=DType.INT8)
    else:
        last = Tensor(name="head/count", elements=1, dtype=size.wide)

    def kernel(streams: int, *, backward: bool = False) -> Kernel:
        return streaming(KernelKind.CROSS_ENTROPY, own, dtype, streams=streams, backward=backward)

    composed = size.cut and not whole and size.shape.execution.composes_loss
    in_place = size.in_place_loss or size.shape.execution.loss is Loss.IN_PLACE
    return Operator(
        reads=(logits,),
        makes=target,
        forward_scratch=kept.size_bytes if composed else 0,
        backward_scratch=0 if in_place else (1 + composed) * kept.size_bytes,
        saves=(kept, targets, last, *((logits,) if size.shape.execution.holds_logits else ())),
        forward=(kernel(9 if composed else 3),),
        backward=(kernel(9 if composed else 2, backward=True),),
    )
