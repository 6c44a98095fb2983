"""Linear layers that overlap collectives of tokens, as in Transformer Engine and Megatron-LM.

The first layers of attention and of the MLP are one product there
(`TELayerNormColumnParallelLinear` of queries, keys and values, or of gate and up), and so are their
gradients. The methods of `initialize_ub` (Transformer Engine 2.20,
transformer_engine/pytorch/module/base.py) are:

- `ring_exchange`: forward of these layers, and the input gradient of the last layer, multiply the
  tokens of one rank at a time (`split_overlap_ag`) while copy engines bring the next;
- `pipeline`: the last layer computes its output in quarters; a kernel scatters each quarter while
  the next is computed (`split_overlap_rs`);
- `bulk` (`bulk_overlap`): a kernel gathers the input of the first layers again while their input
  gradient is computed, and scatters that while the gradient of their weights is computed.

Functions are of transformer_engine/common/comm_gemm_overlap/comm_gemm_overlap.cpp.

Without userbuffers, the last two are whole collectives of NCCL, both in Megatron-LM's
column-parallel layers (`LinearWithGradAccumulationAndAsyncCommunication`,
megatron/core/tensor_parallel/layers.py) and in Transformer Engine (`async_op` in backward of
module/layernorm_linear.py), in blocks and head.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from zsim.model.kernel import FusedPart, Kernel, KernelKind, resized
from zsim.model.transformer.operator import Operator, Stretch
from zsim.model.transformer.size import Size
from zsim.strategy.execution import TokenFusion
from zsim.strategy.overlap_methods import ByKernel, RingExchange

SPLITS = 4
"""Parts of the output of the last layer (`num_splits` of the method pipeline)."""

STREAMS = 3
"""Maximum number of streams on which parts of a product are issued (`_NUM_MAX_UB_STREAMS`)."""

Kernels = tuple[Kernel, ...]
"""Kernels as which one product runs."""

ROWS, OUTPUTS, SUMMANDS = 1, 2, 3
"""Extents of products (batch, m, n, k) along which layers are joined: of weight gradients, of
outputs, and of input gradients."""


def overlapped(
    size: Size, stretches: Sequence[Stretch], first: str, last: str
) -> tuple[Stretch, ...]:
    """Return stretches whose linear layers overlap collectives of tokens, if any do.

    `first` and `last` are Transformer Engine's names of the first and last layers.
    """
    if size.fused_by is TokenFusion.NCCL:
        return tuple(beside_nccl(size, each) for each in stretches)
    if size.fused_by is not TokenFusion.USERBUFFERS or not all(map(_is_trained, stretches)):
        return tuple(stretches)
    found: list[Stretch] = []
    for stretch in stretches:
        operators = list(stretch.operators)
        if stretch.sums_gradients and _is_one_layer(stretch):
            operators = _first_layers(size, stretch.inputs[0], operators, first)
        if stretch.ends is not None:
            operators[-1] = _last_layer(size, operators[-1], last)
        found.append(replace(stretch, operators=tuple(operators)))
    return tuple(found)


def beside_nccl(size: Size, stretch: Stretch) -> Stretch:
    """Return a stretch with joined column-parallel layers whose backward overlaps NCCL."""
    is_beside = size.fused_by is TokenFusion.NCCL and stretch.sums_gradients
    if not is_beside or not _is_trained(stretch) or not _is_one_layer(stretch):
        return stretch
    operators = _one_layer(
        stretch.inputs[0],
        stretch.operators,
        backward=_with(FusedPart.BESIDE_GATHER if size.sequence else None),
        trains=_with(FusedPart.BESIDE_SCATTER),
    )
    return replace(stretch, operators=tuple(operators))


def _first_layers(
    size: Size, source: str, operators: Sequence[Operator], name: str
) -> list[Operator]:
    """Return `operators` with the kernels of all layers that read `source` in the first one."""
    methods = size.shape.execution.overlap_methods
    fprop: RingExchange = getattr(methods, f"{name}_fprop")
    dgrad: ByKernel = getattr(methods, f"{name}_dgrad")
    wgrad: ByKernel = getattr(methods, f"{name}_wgrad")

    def by_rank(product: Kernel) -> Kernels:
        return _by_rank(size, product, FusedPart.GATHERED, fprop)

    return _one_layer(
        source,
        operators,
        forward=by_rank,
        backward=_with(FusedPart.BESIDE_GATHER, dgrad.spared),
        trains=_with(FusedPart.BESIDE_SCATTER, wgrad.spared),
    )


def _with(part: FusedPart | None, spared: int = 0) -> Callable[[Kernel], Kernels]:
    """Return a function that gives a product a part, and the multiprocessors to spare."""
    return lambda product: (replace(product, part=part, spared=spared),)


def _one_layer(
    source: str,
    operators: Sequence[Operator],
    *,
    forward: Callable[[Kernel], Kernels] = lambda product: (product,),
    backward: Callable[[Kernel], Kernels],
    trains: Callable[[Kernel], Kernels],
) -> list[Operator]:
    """Return `operators` with the kernels of all layers that read `source` in the first one.

    The layers are joined to one product per direction; the callables return its kernels.
    """
    places = [place for place, each in enumerate(operators) if _is_layer(each, source)]
    layers = [operators[place] for place in places]
    product, beside = _joined((each.forward for each in layers), OUTPUTS)
    inputs, others = _joined((each.backward for each in layers), SUMMANDS)
    weights, sums = _joined((each.trains for each in layers), ROWS)
    found = [
        replace(each, forward=(), backward=(), trains=()) if place in places else each
        for place, each in enumerate(operators)
    ]
    found[places[0]] = replace(
        layers[0],
        forward=(*beside, *forward(product)),
        backward=(*others, *backward(inputs)),
        trains=(*trains(weights), *sums),
    )
    return found


def _is_trained(stretch: Stretch) -> bool:
    """Return True if all layers train: a frozen weight has no product to overlap."""
    return not any(weight.frozen for each in stretch.operators for weight in each.parameters)


def _is_one_layer(stretch: Stretch) -> bool:
    """Return True if layers read one input; layers of latent attention read several."""
    read = {each.name for own in stretch.operators if own.parameters for each in own.reads}
    return len(read.intersection(stretch.inputs)) <= 1


def _is_layer(operator: Operator, source: str) -> bool:
    """Return True if an operator is a linear layer that reads `source`."""
    return bool(operator.parameters) and any(each.name == source for each in operator.reads)


def _last_layer(size: Size, operator: Operator, name: str) -> Operator:
    """Return the last layer with its output in quarters, and its gradient gathered by rank."""
    methods = size.shape.execution.overlap_methods
    fprop: ByKernel = getattr(methods, f"{name}_fprop")
    dgrad: RingExchange = getattr(methods, f"{name}_dgrad")
    product, before = _joined([operator.forward], OUTPUTS)
    inputs, others = _joined([operator.backward], SUMMANDS)
    _, tokens, rows, columns = product.shape
    # the last part also has the remainder of the rows
    widths = [rows // SPLITS] * (SPLITS - 1)
    widths.append(rows - sum(widths))
    parts = tuple(
        replace(
            resized(product, tokens, width, columns),
            part=FusedPart.SPLIT,
            spared=fprop.spared,
            streams=min(STREAMS, SPLITS),
        )
        for width in widths
    )
    by_rank = _by_rank(size, inputs, FusedPart.GRADIENT, dgrad)
    forward = (*before, *parts) if size.shape.execution.splits_outputs else operator.forward
    return replace(operator, forward=forward, backward=(*others, *by_rank))


def _by_rank(
    size: Size, product: Kernel, part: FusedPart, method: RingExchange
) -> tuple[Kernel, ...]:
    """Return a product split by rank, or by pairs of ranks, of its tokens."""
    each = 2 if method.aggregate and size.tensor % 2 == 0 else 1
    _, _, n, k = product.shape
    own = resized(product, each * size.own_tokens, n, k)
    parts = size.tensor // each
    return (replace(own, part=part, streams=min(STREAMS, parts)),) * parts


def _joined(lists: Iterable[Sequence[Kernel]], along: int) -> tuple[Kernel, tuple[Kernel, ...]]:
    """Return the products in `lists` as one, joined `along` an extent, and the other kernels."""
    every = [kernel for each in lists for kernel in each]
    products = [each for each in every if _multiplies(each)]
    rest = tuple(each for each in every if not _multiplies(each))
    shape = list(products[0].shape)
    shape[along] = sum(each.shape[along] for each in products)
    _, m, n, k = shape
    return resized(products[0], m, n, k), rest


def _multiplies(kernel: Kernel) -> bool:
    return kernel.kind is KernelKind.MATMUL
