"""Builds the `Model` of a transformer from its shape.

FLOPs count only matrix products, 2 per multiply-add, with attention of all pairs of tokens
(Narayanan et al. 2021, section 3.1 and appendix); `Model.attention_flops` tells how many of them
causal masking skips. Saved activations are those that autograd saves for the modules in
`zsim_torch`, which have no dropout; Korthikanti et al. 2022, section 4.1, counts the same tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from zsim.dtype import DType
from zsim.model.architecture import Activation, Architecture, NormPlacement, QKNorm
from zsim.model.experts import Experts, LoadBalancing
from zsim.model.kernel import Kernel
from zsim.model.model import BATCH, Model, ModelError, Segment, Unit, Value
from zsim.model.token_loads import Routing, TokenLoads
from zsim.model.transformer.block import block, like
from zsim.model.transformer.ends import embedding, head
from zsim.model.transformer.further_tokens import further_tokens, with_losses
from zsim.model.transformer.size import Size
from zsim.model.transformer.tiling import tiled_block
from zsim.strategy.precision import Precision


def transformer(
    shape: Architecture,
    *,
    micro_batch_size: int,
    tensor: int = 1,
    precision: Precision = Precision.FP32,
    sequence: bool = False,
    keeps_gathered: bool = False,
    in_place_loss: bool = False,
    loads: TokenLoads | None = None,
) -> Model:
    """Return the model of `shape` for `micro_batch_size` sequences on `tensor` ranks.

    The vocabulary is padded to a multiple of `tensor`, as in Megatron-LM. `Size` describes the
    other arguments; `sequence` has no effect without a tensor axis.

    Raises:
        ModelError: `tensor` does not divide the heads, the width of the MLP, or with `sequence` the
            tokens.
    """
    _need_dividing(shape, micro_batch_size=micro_batch_size, tensor=tensor, sequence=sequence)
    size = Size(
        shape=shape,
        sequences=micro_batch_size,
        tensor=tensor,
        dtype=precision.compute,
        wide=precision.wide,
        sequence=sequence and tensor > 1,
        keeps_gathered=keeps_gathered,
        in_place_loss=in_place_loss,
        loads=loads,
    )
    elements = micro_batch_size * (shape.sequence_length + 1)
    batch = Value(name=BATCH, elements=elements, dtype=DType.INT64, requires_gradient=False)
    units = _units(size, batch)
    parts = [part for unit in units for part in unit.segments]
    forward = [kernel for part in parts for kernel in part.forward]
    # Recomputed kernels do not count as backward.
    backward = [kernel for part in parts for kernel in part.backward if kernel.backward]
    model = Model(
        name=f"{type(shape).__name__.lower()}-{shape.layers}x{shape.hidden_size}",
        units=tuple(units),
        batch=batch,
        micro_batch_size=micro_batch_size,
        tokens=size.tokens,
        tensor=tensor,
        expert=shape.execution.expert,
        expert_tensor=shape.execution.expert_tensor,
        forward_flops=tensor * _products(size, forward),
        backward_flops=tensor * _products(size, backward),
        attention_flops=tensor * sum(each.flops for each in (*forward, *backward) if each.causal),
        masked_flops=tensor * sum(each.flops - each.causal_flops for each in (*forward, *backward)),
        architecture=shape,
        tiles=shape.execution.tiles,
        routing=_routing(size, units),
    )
    _need_matching(shape, model)
    return model


def _routing(size: Size, units: Sequence[Unit]) -> Routing | None:
    """Return the copies of tokens that expert ranks exchange; None if they exchange none."""
    experts, tokens = size.shape.experts, size.own_tokens
    if experts is None or size.shape.execution.expert == 1:
        return None
    sent, capacity = experts.copies(tokens), experts.capacity(tokens)
    made = Routing(
        experts=experts.count,
        sent=sent,
        maximum=experts.count * capacity,
        capacity=capacity,
        padded=experts.pads_to_capacity,
        drops=experts.drops(tokens),
        layers=tuple(each.name for each in units if any(map(_meets_experts, each.segments))),
    )
    return made.limited()


def _meets_experts(segment: Segment) -> bool:
    """Return True if expert ranks exchange outputs of a segment, or gather its inputs."""
    return segment.swaps or segment.reads_all


def _products(size: Size, kernels: Sequence[Kernel]) -> int:
    """Return the FLOPs of matrix products, without rows that fill experts up to a capacity."""
    products = [kernel for kernel in kernels if kernel.kind.multiplies_matrices]
    experts = size.shape.experts
    if experts is None or not experts.pads_to_capacity:
        return sum(kernel.flops for kernel in products)
    tokens = size.own_tokens
    routed = sum(kernel.flops for kernel in products if kernel.loads is not None)
    real = routed * tokens * experts.top_k // experts.copies(tokens)
    return sum(kernel.flops for kernel in products if kernel.loads is None) + real


def _blocks(size: Size, source: Value) -> Iterator[Unit]:
    """Yield all units of all blocks; equivalent blocks are built once and renamed."""
    alike: dict[tuple[bool, ...], tuple[Unit, ...]] = {}  # by window, experts, GEMMs and gradients
    names = {routed: _names(size, source, routed=routed) for routed in {*_routed(size.shape)}}
    for layer in range(size.shape.layers):
        module = size.shape.module_of(layer)
        own = f"block{module}"
        local, routed = size.shape.is_local(layer), size.shape.has_experts(layer)
        stays_wide = not size.shape.execution.quantizes(module, size.shape.layers)
        kind = (
            local,
            routed,
            stays_wide,
            source.requires_gradient,
            *(size.is_frozen(f"{own}{each}") for each in names[routed]),
        )
        if kind not in alike:
            given = replace(source, name="given")  # a name that no block computes
            made = _cut(
                replace(size, stays_wide=stays_wide), own, given, local=local, routed=routed
            )
            alike[kind] = like(made, own, "block", given)
        calls = own if module != layer else None
        units = like(alike[kind], "block", f"block{layer}", source, calls=calls)
        yield from units
        source = units[-1].segments[-1].outputs[-1]


def _routed(shape: Architecture) -> Iterator[bool]:
    """Yield True for a block with routed experts, False for another block."""
    return (shape.has_experts(layer) for layer in range(shape.layers))


def _names(size: Size, source: Value, *, routed: bool) -> list[str]:
    """Return names of the parameters of a block, without its name; none if none is frozen."""
    freezes = size.shape.lora is not None or size.shape.frozen
    return [
        parameter.name.removeprefix("block0")
        for unit in (_cut(size, "block0", source, local=False, routed=routed) if freezes else ())
        for parameter in unit.parameters
    ]


def _cut(size: Size, name: str, source: Value, *, local: bool, routed: bool) -> tuple[Unit, ...]:
    """Return the units of a block: one, or its tiles, which have no experts."""
    if size.shape.execution.tiles > 1:
        return tiled_block(size, name, source, local=local)
    return (block(size, name, source, local=local, routed=routed),)


def _need_matching(shape: Architecture, model: Model) -> None:
    """Raise ModelError unless each frozen pattern matches, and some parameter is trained."""
    names = [parameter.name for parameter in model.parameters]
    for pattern in shape.frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"model.frozen: {pattern!r} is the name of no parameter; there are {names[0]}, "
                f"{names[1]}, ..., {names[-1]}"
            )
    if names and model.frozen.issuperset(names):
        patterns = ", ".join(map(repr, shape.frozen))
        raise ModelError(f"model.frozen: {patterns} leave nothing to train")


def _units(size: Size, batch: Value) -> list[Unit]:
    """Return the embedding, the blocks and the head; each reads the output of the previous one."""
    units = [embedding(size, batch)]
    units += _blocks(size, units[-1].segments[-1].outputs[-1])
    source = units[-1].segments[-1].outputs[-1]
    further = further_tokens(size, source, batch)
    return [*units, *further, with_losses(size, head(size, source), further)]


def _need_experts(shape: Architecture, *, tensor: int, sequence: bool) -> None:
    """Raise ModelError unless expert ranks divide the experts, and tensor ranks have own tokens."""
    ranks, experts = shape.execution.expert, shape.experts
    if experts is not None and tensor > 1:
        parts = shape.execution.expert_tensor
        if not (sequence and (shape.execution.whole_experts or parts == tensor)):
            raise ModelError(
                f"model.experts: not modelled with tensor {tensor} unless tokens are sharded and "
                "experts whole; say sequence_parallel and parallel.expert_tensor 1"
            )
        if experts.shared_intermediate_size % tensor:
            raise ModelError(
                f"parallel.tensor: {tensor} must divide shared_intermediate_size "
                f"{experts.shared_intermediate_size}"
            )
    own_loads, kind = shape.execution.own_loads, LoadBalancing.GLOBAL_AUX_LOSS
    if experts is not None and own_loads and experts.load_balancing_type is kind:
        why = "is not modelled for this runtime, whose ranks sum no loads; say aux_loss"
        raise ModelError(f"model.experts.load_balancing_type: {kind} {why}")
    if experts is not None:
        _need_parts(shape, experts, tensor=tensor)
    if ranks == 1:
        return
    if experts is None:
        raise ModelError(f"parallel.expert: {ranks} needs a model with experts")
    if experts.count % ranks:
        raise ModelError(f"parallel.expert: {ranks} must divide the {experts.count} experts")


def _need_parts(shape: Architecture, experts: Experts, *, tensor: int) -> None:
    """Raise ModelError unless the ranks with parts of an expert are tensor ranks, and divide it."""
    parts, width = shape.execution.expert_tensor, experts.intermediate_size
    if parts == 1:
        return
    if parts != tensor:
        raise ModelError(
            f"parallel.expert_tensor: {parts} is not modelled with tensor {tensor} in built "
            f"blocks; use {f'{tensor} or ' if tensor > 1 else ''}1"
        )
    if width % parts:
        raise ModelError(
            f"parallel.expert_tensor: {parts} must divide intermediate_size {width} of experts"
        )
    if shape.execution.dispatch is not None:
        raise ModelError(
            f"parallel.expert_tensor: {parts} is not modelled with a library that exchanges "
            "tokens; use 1, or moe_token_dispatcher_type alltoall"
        )


def _need_own_tokens(shape: Architecture, *, tensor: int, sequence: bool) -> None:
    """Raise ModelError unless blocks for further tokens are modelled with `tensor` ranks."""
    if not sequence or shape.execution.replicates_embedding:
        why = "for this runtime" if sequence else "unless tokens are sharded; say sequence_parallel"
        raise ModelError(f"model.mtp_layers: not modelled with tensor {tensor} {why}")
    if shape.hidden_size % tensor:
        raise ModelError(f"parallel.tensor: {tensor} must divide hidden_size {shape.hidden_size}")


def _need_dividing(
    shape: Architecture, *, micro_batch_size: int, tensor: int, sequence: bool
) -> None:
    """Raise ModelError unless `tensor` divides the heads, MLP width and tokens, among others."""
    if shape.execution.tiles > 1:
        if sequence:
            raise ModelError(
                f"zero.tiles: {shape.execution.tiles} is not modelled with sequence_parallel, "
                "where each tile would gather all tokens; say zero.tiles 1, or false there"
            )
        for name, differs in (
            ("lora", shape.lora is not None),
            ("hidden_groups", shape.hidden_groups is not None),
            ("qk_norm", shape.qk_norm is not None),
            ("norm_placement", shape.norm_placement is not NormPlacement.BEFORE),
            ("shared_norm", shape.shared_norm),
            ("activation", shape.activation is Activation.XIELU),
            *((name, getattr(shape, name)) for name in ("latent", "sinks", "mtp_layers")),
        ):
            if differs:
                raise ModelError(f"model.{name}: not modelled with zero.tiles, allowed is 1")
    _need_experts(shape, tensor=tensor, sequence=sequence)
    if tensor > 1 and shape.mtp_layers:
        _need_own_tokens(shape, tensor=tensor, sequence=sequence)
    if shape.latent is not None and tensor > 1 and not shape.execution.cuts_latent:
        why = f"not modelled with tensor {tensor} for this runtime"
        raise ModelError(f"model.latent: {why}; say parallel.tensor 1")
    if shape.lora is not None and tensor > 1:
        raise ModelError(f"model.lora: not modelled with tensor {tensor}, allowed is 1")
    if shape.activation is Activation.XIELU and tensor > 1:
        raise ModelError(
            f"model.activation: xielu is not modelled with tensor {tensor}, whose ranks would sum "
            "the gradients of its numbers; say parallel.tensor 1"
        )
    if shape.qk_norm is QKNorm.WIDTH and tensor > 1:
        raise ModelError(
            f"model.qk_norm: width is not modelled with tensor {tensor}, whose ranks hold a part "
            "of each row; say head, or parallel.tensor 1"
        )
    first, last = shape.execution.wide_layers
    if first + last > shape.layers:
        name = "num_layers_at_end_in_bf16" if last else "num_layers_at_start_in_bf16"
        raise ModelError(
            f"train.{name}: {last or first} must be at most {shape.layers - (last and first)}, the "
            "other layers of the model"
        )
    for name, extent in (
        ("attention_heads", shape.attention_heads),
        ("key_value_heads", shape.shared_heads),
        ("intermediate_size", shape.wide),
    ):
        if extent % tensor:
            raise ModelError(f"parallel.tensor: {tensor} must divide {name} {extent}")
    if micro_batch_size < 1:
        raise ModelError(f"train.micro_batch_size: {micro_batch_size} must be at least 1")
    tokens = micro_batch_size * shape.sequence_length
    if sequence and tokens % tensor:
        raise ModelError(
            f"parallel.tensor: {tensor} must divide the {tokens} tokens of a micro-batch"
        )
