"""The `Model` of a GPT.

With one rank on the tensor axis a block is one segment. With more it is cut where Megatron-LM's
all-reduces stand (Shoeybi et al. 2019, section 3): attention and MLP take a replicated input, keep
a part of the hidden units on each rank, and make summands of their output.

FLOPs count matrix products alone, 2 per multiply-add, attention without causal halving (Narayanan
et al. 2021, section 3.1 and appendix). Saved activations follow Korthikanti et al. 2022, section
4.1, without dropout masks: zsim's GPT has no dropout.
"""

from dataclasses import dataclass

from zsim.architecture import GPT
from zsim.dtype import DType
from zsim.kernel import Kernel, KernelKind
from zsim.model import BATCH, Model, ModelError, Parameter, Segment, Unit, Value
from zsim.strategy import Precision

STATISTICS = 2
"""fp32 numbers that a layer norm keeps for each token: mean and reciprocal deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """Numbers that the parts of a GPT are made of, on one rank of the tensor axis."""

    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tokens: int
    tensor: int
    dtype: DType
    loss: DType

    @property
    def flow(self) -> int:
        """Elements of the hidden state."""
        return self.tokens * self.hidden

    def matmul(self, rows: int, columns: int, inner: int) -> Kernel:
        """Rows x inner times inner x columns."""
        moved = rows * inner + inner * columns + rows * columns
        return Kernel(
            kind=KernelKind.MATMUL,
            flops=2 * rows * columns * inner,
            bytes=moved * self.dtype.size_bytes,
            dtype=self.dtype,
        )

    def elementwise(self, elements: int, *, streams: int) -> Kernel:
        """A kernel that moves `streams` tensors of `elements`, one operation for each element."""
        return Kernel(
            kind=KernelKind.ELEMENTWISE,
            flops=elements * streams,
            bytes=elements * streams * self.dtype.size_bytes,
            dtype=self.dtype,
        )

    def value(self, name: str) -> Value:
        """A hidden state called `name`."""
        return Value(name=name, elements=self.flow, dtype=self.dtype)


def gpt(
    shape: GPT, *, micro_batch_size: int, tensor: int = 1, precision: Precision = Precision.FP32
) -> Model:
    """The model of `shape` for `micro_batch_size` sequences on `tensor` ranks.

    The vocabulary is padded to a multiple of `tensor`, as Megatron-LM does.

    Raises:
        ModelError: `tensor` does not divide the attention heads.
    """
    if shape.attention_heads % tensor:
        raise ModelError(f"tensor: {tensor} must divide attention_heads {shape.attention_heads}")
    if micro_batch_size < 1:
        raise ModelError(f"micro_batch_size: {micro_batch_size} must be at least 1")
    size = _Size(
        hidden=shape.hidden_size,
        heads=shape.attention_heads // tensor,
        sequence=shape.sequence_length,
        vocabulary=-(-shape.vocab_size // tensor),
        tokens=micro_batch_size * shape.sequence_length,
        tensor=tensor,
        dtype=precision.compute,
        loss=precision.optimizer,
    )
    units = [_embedding(size)]
    for layer in range(shape.layers):
        source = f"block{layer - 1}/output" if layer else "embedding/output"
        units.append(_block(size, f"block{layer}", source))
    units.append(_head(size, units[-1].segments[-1].outputs[-1].name, tied=shape.tied_embeddings))
    kernels = [kernel for unit in units for part in unit.segments for kernel in part.forward]
    products = sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)
    return Model(
        name=f"gpt-{shape.layers}x{shape.hidden_size}",
        units=tuple(units),
        batch=Value(
            name=BATCH,
            elements=micro_batch_size * (shape.sequence_length + 1),
            dtype=DType.INT64,
            requires_gradient=False,
        ),
        micro_batch_size=micro_batch_size,
        tokens=size.tokens,
        tensor=tensor,
        forward_flops=products * tensor,
        backward_flops=2 * products * tensor,
        architecture=shape,
    )


def _embedding(size: _Size) -> Unit:
    token = Parameter(
        name="embedding.token.weight",
        shape=(size.vocabulary, size.hidden),
        tensor_sharded=size.tensor > 1,
    )
    position = Parameter(name="embedding.position.weight", shape=(size.sequence, size.hidden))
    look_up = (size.elementwise(size.flow, streams=2),)
    add = (size.elementwise(size.flow, streams=3),)
    output = size.value("embedding/output")
    if size.tensor == 1:
        whole = Segment(
            inputs=(BATCH,),
            outputs=(output,),
            parameters=(token.name, position.name),
            forward=look_up + add,
            backward=look_up + add,
        )
        return Unit(
            name="embedding", parameters=(token, position), segments=(whole,), checkpoint=False
        )
    words = Segment(
        inputs=(BATCH,),
        outputs=(size.value("embedding/words"),),
        parameters=(token.name,),
        reduces_output=True,
        forward=look_up,
        backward=look_up,
    )
    places = Segment(
        inputs=("embedding/words",),
        outputs=(output,),
        parameters=(position.name,),
        saves_input=False,
        forward=add,
        backward=add,
    )
    return Unit(
        name="embedding", parameters=(token, position), segments=(words, places), checkpoint=False
    )


def _linear(name: str, rows: int, columns: int, *, sharded: bool, bias: bool) -> list[Parameter]:
    """Weight (`rows` x `columns`) of a linear layer, and its bias if it has one here."""
    weight = Parameter(name=f"{name}.weight", shape=(rows, columns), tensor_sharded=sharded)
    if not bias:
        return [weight]
    return [weight, Parameter(name=f"{name}.bias", shape=(rows,), tensor_sharded=sharded)]


def _norm(name: str, hidden: int) -> list[Parameter]:
    return [
        Parameter(name=f"{name}.weight", shape=(hidden,)),
        Parameter(name=f"{name}.bias", shape=(hidden,)),
    ]


def _attention(size: _Size, source: str, target: Value) -> tuple[Segment, list[Parameter]]:
    """Queries, keys and values, scores, their softmax, and the output projection."""
    own = size.hidden // size.tensor
    scores = size.tokens * size.sequence * size.heads
    head_size = own // size.heads
    product = size.matmul(size.tokens * size.heads, size.sequence, head_size)
    forward = (
        size.matmul(size.tokens, 3 * own, size.hidden),
        product,
        size.elementwise(scores, streams=2),
        product,
        size.matmul(size.tokens, size.hidden, own),
    )
    name = source.split("/", maxsplit=1)[0]
    parameters = _linear(
        f"{name}.qkv", 3 * own, size.hidden, sharded=size.tensor > 1, bias=True
    ) + _linear(f"{name}.proj", size.hidden, own, sharded=size.tensor > 1, bias=False)
    segment = Segment(
        inputs=(source,),
        outputs=(target,),
        parameters=tuple(parameter.name for parameter in parameters),
        saved_bytes=(4 * size.tokens * own + scores) * size.dtype.size_bytes,
        reduces_output=size.tensor > 1,
        reduces_input_gradient=size.tensor > 1,
        forward=forward,
        backward=_backward(forward),
    )
    return segment, parameters


def _perceptron(size: _Size, source: str, target: Value) -> tuple[Segment, list[Parameter]]:
    """Two linear layers with four times the hidden size between them, and GELU."""
    own = 4 * size.hidden // size.tensor
    forward = (
        size.matmul(size.tokens, own, size.hidden),
        size.elementwise(size.tokens * own, streams=2),
        size.matmul(size.tokens, size.hidden, own),
    )
    name = source.split("/", maxsplit=1)[0]
    parameters = _linear(
        f"{name}.up", own, size.hidden, sharded=size.tensor > 1, bias=True
    ) + _linear(f"{name}.down", size.hidden, own, sharded=size.tensor > 1, bias=False)
    segment = Segment(
        inputs=(source,),
        outputs=(target,),
        parameters=tuple(parameter.name for parameter in parameters),
        saved_bytes=2 * size.tokens * own * size.dtype.size_bytes,
        reduces_output=size.tensor > 1,
        reduces_input_gradient=size.tensor > 1,
        forward=forward,
        backward=_backward(forward),
    )
    return segment, parameters


def _backward(forward: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Backward of a matrix product is two, one for each operand; of the rest as much as forward."""
    return tuple(
        kernel for kernel in forward for _ in range(2 if kernel.kind is KernelKind.MATMUL else 1)
    )


def _normalise(
    size: _Size, source: str, target: Value, name: str
) -> tuple[Segment, list[Parameter]]:
    parameters = _norm(name, size.hidden)
    kernels = (size.elementwise(size.flow, streams=2),)
    segment = Segment(
        inputs=(source,),
        outputs=(target,),
        parameters=tuple(parameter.name for parameter in parameters),
        saved_bytes=STATISTICS * size.tokens * DType.FP32.size_bytes,
        forward=kernels,
        backward=kernels + kernels,
    )
    return segment, parameters


def _add(
    size: _Size, sources: tuple[str, str], target: Value, name: str
) -> tuple[Segment, list[Parameter]]:
    """The residual sum, with the bias that was held back until the summands were summed."""
    bias = Parameter(name=f"{name}.bias", shape=(size.hidden,))
    segment = Segment(
        inputs=sources,
        outputs=(target,),
        parameters=(bias.name,),
        saves_input=False,
        forward=(size.elementwise(size.flow, streams=3),),
        backward=(size.elementwise(size.flow, streams=3),),
    )
    return segment, [bias]


def _block(size: _Size, name: str, source: str) -> Unit:
    normed, attended, middle = (size.value(f"{name}/{part}") for part in ("ln1", "proj", "sum"))
    normed2, transformed = size.value(f"{name}/ln2"), size.value(f"{name}/down")
    output = size.value(f"{name}/output")
    parts = [
        _normalise(size, source, normed, f"{name}.ln1"),
        _attention(size, normed.name, attended),
        _add(size, (source, attended.name), middle, f"{name}.proj"),
        _normalise(size, middle.name, normed2, f"{name}.ln2"),
        _perceptron(size, normed2.name, transformed),
        _add(size, (middle.name, transformed.name), output, f"{name}.down"),
    ]
    parameters = tuple(parameter for _, own in parts for parameter in own)
    segments = tuple(segment for segment, _ in parts)
    if size.tensor == 1:
        kept = sum(value.size_bytes for value in (normed, middle, normed2))
        segments = (_joined(segments, (source,), output, parameters, kept=kept),)
    return Unit(name=name, parameters=parameters, segments=segments)


def _joined(
    segments: tuple[Segment, ...],
    inputs: tuple[str, ...],
    output: Value,
    parameters: tuple[Parameter, ...],
    *,
    kept: int,
) -> Segment:
    """One segment that does what several do; `kept` bytes of inner values are saved by it."""
    return Segment(
        inputs=inputs,
        outputs=(output,),
        parameters=tuple(parameter.name for parameter in parameters),
        saved_bytes=kept + sum(segment.saved_bytes for segment in segments),
        forward=tuple(kernel for segment in segments for kernel in segment.forward),
        backward=tuple(kernel for segment in segments for kernel in segment.backward),
    )


def _head(size: _Size, source: str, *, tied: bool) -> Unit:
    """Final norm, logits over the own part of the vocabulary, cross entropy.

    With a tensor axis the maximum, the sum of exponentials and the target's logit of each token are
    combined over the ranks (Shoeybi et al. 2019, section 3): three numbers for each token.
    """
    normed = size.value("head/ln")
    loss = Value(name="head/loss", elements=1, dtype=size.loss)
    norm, norm_parameters = _normalise(size, source, normed, "head.ln")
    weight = Parameter(
        name="embedding.token.weight" if tied else "head.weight",
        shape=(size.vocabulary, size.hidden),
        tensor_sharded=size.tensor > 1,
    )
    logits = size.tokens * size.vocabulary
    forward = (
        size.matmul(size.tokens, size.vocabulary, size.hidden),
        size.elementwise(logits, streams=3),
    )
    statistics = Value(name="head/statistics", elements=3 * size.tokens, dtype=size.loss)
    scores = Segment(
        inputs=(normed.name, BATCH),
        outputs=(statistics if size.tensor > 1 else loss,),
        parameters=(weight.name,),
        saved_bytes=logits * size.loss.size_bytes,
        reduces_output=size.tensor > 1,
        reduces_input_gradient=size.tensor > 1,
        forward=forward,
        backward=_backward(forward),
    )
    parameters = (*norm_parameters, weight)
    if size.tensor == 1:
        whole = _joined((norm, scores), (source, BATCH), loss, parameters, kept=normed.size_bytes)
        return Unit(name="head", parameters=parameters, segments=(whole,), checkpoint=False)
    entropy = Segment(
        inputs=(statistics.name,),
        outputs=(loss,),
        forward=(size.elementwise(statistics.elements, streams=1),),
        backward=(size.elementwise(statistics.elements, streams=1),),
    )
    return Unit(
        name="head", parameters=parameters, segments=(norm, scores, entropy), checkpoint=False
    )
