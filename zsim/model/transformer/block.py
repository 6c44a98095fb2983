"""A block: attention and an MLP, each with norms and a residual."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from zsim.model.architecture import Activation, NormPlacement
from zsim.model.kernel import Kernel, KernelKind, dropout, streaming
from zsim.model.model import Parameter, Segment, Unit, Value
from zsim.model.transformer.attention import attention
from zsim.model.transformer.gathered_layers import each_gathered, rearranged
from zsim.model.transformer.linear import column_sum, layer, normalize
from zsim.model.transformer.operator import (
    Operator,
    Stretch,
    Tensor,
    joined,
    parameters_of,
    tensor_of,
)
from zsim.model.transformer.overlapped_layers import overlapped
from zsim.model.transformer.segment import segments, until_saved
from zsim.model.transformer.size import Size
from zsim.strategy.execution import Recomputed

Part = TypeVar("Part")

SCRIPTED = (8, 9)
"""Tensors that an unfused activation moves in each direction: 0.5 x (1 + tanh(a x (1 + b x x)))
is one kernel per direction, which writes six intermediate results for backward, and reads them."""


def block(
    size: Size, name: str, source: Value, *, local: bool = False, routed: bool = False
) -> Unit:
    """Return the block called `name`, which reads `source`; if `local`, tokens see a window.

    A `routed` block has experts instead of an MLP.

    With one rank on the tensor axis it is one segment. With more it is cut at Megatron-LM's
    all-reduces (Shoeybi et al. 2019, section 3): attention and MLP read a replicated input, hold
    part of the hidden units on each rank, and compute partial sums of their output. It is also cut
    where ranks that share a sequence exchange keys and values.
    """
    if size.shape.parallel_residual:
        stretches = _side_by_side(size, name, source, local=local)
    else:
        stretches = one_after_the_other(size, name, source, local=local, routed=routed)
    parameters = parameters_of(stretches)
    biases = tuple(each for each in parameters if each.load)
    if not size.cut:
        stretches = between_exchanges(stretches)
    made = segments(rearranged(size, stretches), (source,), size.shape.execution)
    if size.shape.execution.early_stop:
        made = until_saved(made)
    held = tuple(each for each in parameters if not each.load)
    return Unit(name=name, parameters=held, segments=made, biases=biases)


def between_exchanges(
    stretches: Sequence[Stretch], later: Sequence[str] = ()
) -> tuple[Stretch, ...]:
    """Join the stretches between exchanges of keys and values, or of tokens of experts.

    Values in `later` are read after all of them. A stretch that ends in an exchange of tokens of
    experts is not joined, nor is an auxiliary loss, before which loads are summed.
    """
    parts: list[list[Stretch]] = [[]]
    for each in stretches:
        if parts[-1] and (each.exchanges or _is_apart(each) or _is_apart(parts[-1][-1])):
            parts.append([])
        parts[-1].append(each)
    return tuple(
        joined(
            part,
            [
                *(name for rest in parts[place + 1 :] for each in rest for name in each.inputs),
                *later,
            ],
        )
        for place, part in enumerate(parts)
    )


def _is_apart(stretch: Stretch) -> bool:
    is_alone = stretch.side or stretch.reruns or stretch.loads is not None
    return is_alone or stretch.swaps or stretch.reads_all


def _side_by_side(size: Size, name: str, source: Value, *, local: bool) -> tuple[Stretch, ...]:
    """Return attention and MLP that read the same hidden state, with one norm each or shared."""
    parts = ("ln1", "ln2", "proj", "down", "output")
    normed, normed2, attended, transformed, output = (size.value(f"{name}/{p}") for p in parts)
    shared = size.shape.shared_norm
    read = normed if shared else normed2
    return (
        norm(size, source, normed, f"{name}.ln1"),
        *overlapped(size, attention(size, normed, attended, name, local=local), "qkv", "proj"),
        *(() if shared else (norm(size, source, normed2, f"{name}.ln2"),)),
        *_feed_forward(size, read, transformed, name),
        add(size, (source, attended, transformed), output, (f"{name}.proj", f"{name}.down")),
    )


def one_after_the_other(
    size: Size, name: str, source: Value, *, local: bool, routed: bool
) -> tuple[Stretch, ...]:
    """Return attention and MLP, or experts, each with its norms and added to its input."""
    attended, transformed = size.value(f"{name}/proj"), size.value(f"{name}/down")
    middle, output = size.value(f"{name}/sum"), size.value(f"{name}/output")
    before, read = _before(size, source, f"{name}.ln1", alone=size.shape.latent is not None)
    after, added = _after(size, attended, f"{name}.ln1_after")
    before2, read2 = _before(size, middle, f"{name}.ln2", alone=routed)
    after2, added2 = _after(size, transformed, f"{name}.ln2_after")
    if routed:
        from zsim.model.transformer.mixture import mixture  # noqa: PLC0415 (most models have no experts)

        again = Recomputed.EXPERTS in size.shape.execution.recomputes
        made = mixture(size, read2, transformed, name)
        last = tuple(replace(each, reruns=again) for each in made)
    else:
        last = _feed_forward(size, read2, transformed, name)
    return (
        *before,
        *overlapped(size, attention(size, read, attended, name, local=local), "qkv", "proj"),
        *after,
        add(size, (source, added), middle, (f"{name}.proj",)),
        *before2,
        *last,
        *after2,
        add(size, (middle, added2), output, (f"{name}.down",)),
    )


def _feed_forward(size: Size, source: Value, target: Value, name: str) -> tuple[Stretch, ...]:
    """Return the MLP of the block `name`, which may run again in backward."""
    made = overlapped(size, perceptron(size, source, target, name), "fc1", "fc2")
    if Recomputed.MLP not in size.shape.execution.recomputes:
        return made
    from zsim.model.transformer.recomputed_parts import rerun  # noqa: PLC0415 (rare)

    return tuple(rerun(each) for each in made)


def _before(
    size: Size, source: Value, name: str, *, alone: bool
) -> tuple[tuple[Stretch, ...], Value]:
    """Return the norm before attention or MLP, if any, and the value that they then read.

    A norm that is `alone`, not a part of the next layer, may run again in backward
    (`recompute_input_layernorm` and `recompute_pre_mlp_layernorm` of TransformerLayer,
    megatron/core/transformer/transformer_layer.py in August 2026, d98e8a64).
    """
    if size.shape.norm_placement is NormPlacement.AFTER:
        return (), source
    normed = size.value(name.replace(".", "/"))
    reruns = alone and Recomputed.NORMS in size.shape.execution.recomputes
    return (replace(norm(size, source, normed, name), reruns=reruns),), normed


def _after(size: Size, source: Value, name: str) -> tuple[tuple[Stretch, ...], Value]:
    """Return the norm after attention or MLP, if any, and the value to add."""
    if size.shape.norm_placement is NormPlacement.BEFORE:
        return (), source
    normed = size.value(name.replace(".", "/"))
    return (norm(size, source, normed, name),), normed


def like(
    units: Sequence[Unit], old: str, name: str, source: Value, *, calls: str | None = None
) -> tuple[Unit, ...]:
    """Return the block called `name`, which reads `source`: the units of block `old`, renamed.

    A deep model repeats one block, with the same kernels. If it `calls` an earlier block again, it
    shares that block's parameters.
    """
    names = {units[0].segments[0].inputs[0]: source.name}

    def renamed(each: str, new: str = name) -> str:
        if each not in names:
            names[each] = f"{new}{each.removeprefix(old)}"
        return names[each]

    return tuple(
        replace(
            unit,
            name=renamed(unit.name),
            block=unit.block and name,
            module=calls or "",
            parameters=tuple(
                [
                    _parameter(parameter, renamed(parameter.name, calls or name))
                    for parameter in unit.parameters
                ]
            ),
            biases=tuple(
                replace(each, name=renamed(each.name, calls or name), load=renamed(each.load))
                for each in unit.biases
            ),
            segments=tuple(
                [
                    _segment(
                        segment,
                        tuple(map(renamed, segment.inputs)),
                        tuple([_value(each, renamed(each.name)) for each in segment.outputs]),
                        tuple(map(renamed, segment.parameters)),
                        segment.routes and renamed(segment.routes),
                    )
                    for segment in unit.segments
                ]
            ),
        )
        for unit in units
    )


def copier(kind: type[Part], *names: str) -> Callable[..., Part]:
    """Return a function that copies an object of `kind` with other values of the fields `names`.

    `kind` is a dataclass with slots. Nothing is checked or derived from the new values.
    """
    kept = [each.name for each in fields(kind) if each.name not in names]  # type: ignore[arg-type]  # a dataclass
    kept_of: Callable[[Part], tuple[Any, ...]] = attrgetter(*kept)
    puts = [getattr(kind, name).__set__ for name in (*kept, *names)]

    def copy(old: Part, *values: object) -> Part:
        made = object.__new__(kind)
        for put, value in zip(puts, (*kept_of(old), *values), strict=True):
            put(made, value)
        return made

    return copy


_value, _parameter = copier(Value, "name"), copier(Parameter, "name")
_segment = copier(Segment, "inputs", "outputs", "parameters", "routes")


def perceptron(size: Size, source: Value, target: Value, name: str) -> tuple[Stretch, ...]:
    """Return the MLP of the block `name`; the residual sum adds the bias of its output."""
    wide = size.inner_width
    normed, kept = size.whole(source), size.kept_in_block(source)
    gated = size.shape.gated
    layers: list[tuple[Operator, ...]] = []
    for part in ("gate", "up") if gated else ("up",):
        rows = size.rows(f"{name}/{part}", wide)
        biased = size.shape.bias
        layers.append(
            layer(
                size, normed, rows, f"{name}.{part}", biased=biased, kept=kept, shares=bool(layers)
            )
        )
    up = size.rows(f"{name}/up", wide)
    core = activate(size, size.rows(f"{name}/gate", wide) if gated else None, up, name)
    core += layer(size, core[-1].makes, size.whole(target), f"{name}.down", scatters=True)
    if size.gathers_each:
        rest = Stretch(
            inputs=tuple(each[-1].makes.name for each in layers),
            outputs=(target,),
            operators=core,
            ends=size.token_sum,
        )
        return (*each_gathered(size, source, layers), rest)
    whole = Stretch(
        inputs=(source.name,),
        outputs=(target,),
        operators=(*(each for operators in layers for each in operators), *core),
        begins=size.token_gather,
        ends=size.token_sum,
    )
    return (whole,)


def activate(size: Size, gate: Tensor | None, up: Tensor, name: str) -> tuple[Operator, ...]:
    """Return the operators from `up`, and its `gate` if any, to the input of the last layer."""
    wide = size.inner_width
    product = size.rows(f"{name}/product", wide)
    if gate is not None and size.shape.execution.compiled:
        return (_gate(size, gate, up, product),)
    active = size.rows(f"{name}/active", wide)
    if size.shape.activation is Activation.RELU2 and not size.shape.execution.compiled:
        rectified = size.rows(f"{name}/rectified", wide)
        return (_curve(size, up, rectified), _square(size, rectified, active))
    if gate is None:
        return (_curve(size, up, active, name),)
    return (_curve(size, gate, active), _times(size, active, up, product))


def _curve(size: Size, source: Tensor, target: Tensor, name: str = "") -> Operator:
    """Return the activation function; ReLU computes its gradient from its output.

    xIELU has two trained numbers in block `name`; its backward also sums their gradients.
    """
    activation, compiled = size.shape.activation, size.shape.execution.compiled
    rectified = activation is Activation.RELU or (activation is Activation.RELU2 and not compiled)
    streams = (2, 3) if size.shape.fused or rectified else SCRIPTED
    trained = ("alpha_p", "alpha_n") if activation is Activation.XIELU else ()
    return Operator(
        reads=(source,),
        makes=target,
        saves=(target,) if rectified else (source,),
        parameters=tuple(size.copied(f"{name}.{each}", 1) for each in trained),
        forward=(_over(size, source, KernelKind.ACTIVATION, streams[0]),),
        backward=(_over(size, source, KernelKind.ACTIVATION, streams[1], backward=True),),
    )


def _square(size: Size, source: Tensor, target: Tensor) -> Operator:
    """Return the square of a tensor, which backward multiplies by twice its source."""
    kind = KernelKind.ELEMENTWISE
    return Operator(
        reads=(source,),
        makes=target,
        saves=(source,),
        forward=(_over(size, source, kind, 2),),
        backward=(_over(size, source, kind, 3, backward=True),),
    )


def _times(size: Size, left: Tensor, right: Tensor, target: Tensor) -> Operator:
    """Return the product of two tensors."""
    kind = KernelKind.ELEMENTWISE
    return Operator(
        reads=(left, right),
        makes=target,
        saves=(left, right),
        forward=(_over(size, left, kind, 3),),
        backward=(
            _over(size, left, kind, 3, backward=True),
            _over(size, left, kind, 3, backward=True),
        ),
    )


def _gate(size: Size, gate: Tensor, up: Tensor, target: Tensor) -> Operator:
    """Return activation and product in one kernel per direction."""
    return Operator(
        reads=(gate, up),
        makes=target,
        saves=(gate, up),
        forward=(_over(size, gate, KernelKind.ELEMENTWISE, 3),),
        backward=(_over(size, gate, KernelKind.ELEMENTWISE, 5, backward=True),),
    )


def _over(
    size: Size, tensor: Tensor, kind: KernelKind, streams: int, *, backward: bool = False
) -> Kernel:
    """Return a kernel over `streams` tensors of the shape of `tensor`."""
    shape = (size.tokens, tensor.elements // size.tokens)
    return streaming(kind, shape, size.dtype, streams=streams, backward=backward)


def norm(size: Size, source: Value, target: Value, name: str) -> Stretch:
    """Return the norm `name`."""
    return Stretch(
        inputs=(source.name,),
        outputs=(target,),
        operators=(normalize(size, tensor_of(source), tensor_of(target), name),),
    )


def add(size: Size, sources: Sequence[Value], target: Value, names: tuple[str, ...]) -> Stretch:
    """Return the residual sum, with the biases that the summed layers left out."""
    shape = size.shape
    biased = {"proj": shape.biased_output, "down": shape.bias}
    biases = tuple(
        size.copied(f"{name}.bias", size.hidden)
        for name in names
        if biased[name.rpartition(".")[2]]
    )
    area, dtype = (size.own_tokens, size.hidden), size.dtype
    # If compiled, the norm after it reads the sum in the same kernel.
    streams = 2 if shape.execution.compiled else 3
    adds: tuple[Kernel, ...] = ()
    for _ in sources[1:]:
        if not shape.fused:  # first add the bias of each term, and drop elements
            adds += (streaming(KernelKind.ELEMENTWISE, area, dtype, streams=2),)
            adds += (dropout(area, dtype),)
        adds += (streaming(KernelKind.ELEMENTWISE, area, dtype, streams=streams),)
    back: tuple[Kernel, ...] = ()
    if not shape.fused:
        back += tuple(dropout(area, dtype, backward=True) for _ in sources[1:])
    trained = [each for each in biases if not each.frozen]
    return Stretch(
        inputs=tuple(source.name for source in sources),
        outputs=(target,),
        operators=(
            Operator(
                reads=tuple(map(tensor_of, sources)),
                makes=tensor_of(target),
                parameters=biases,
                saves=tuple(mask for each in sources[1:] for mask in size.masks(each)),
                shares_gradient=not shape.dropout,
                draws=size.draws,
                forward=adds,
                backward=back,
                trains=tuple(
                    column_sum(size, size.hidden, tokens=size.own_tokens) for _ in trained
                ),
            ),
        ),
    )
