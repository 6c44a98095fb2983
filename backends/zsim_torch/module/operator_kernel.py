"""Compute costs of ATen operators from the shapes of their arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind, flash_attention
from zsim_torch.ground.torch_dtype import DTYPE_OF_TORCH

Arguments = tuple[Any, ...]
"""The positional arguments of an operator."""

KINDS = {
    KernelKind.NORM: ("norm",),
    KernelKind.CROSS_ENTROPY: ("log_softmax", "nll_loss"),
    KernelKind.SOFTMAX: ("softmax",),
    KernelKind.ACTIVATION: ("gelu", "silu", "relu", "tanh", "sigmoid", "hardswish", "elu", "mish"),
    KernelKind.EMBEDDING: ("embedding",),
}
"""Parts of an operator's name by kind of kernel; the first match decides."""

PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products, and the position of the first operand."""

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
"""Attention that keeps its scores on the chip, as `capture` calls it on any device."""


def kernel_of(
    operator: Any,  # noqa: ANN401  (torch names no type for an operator)
    arguments: Arguments,
    keywords: Mapping[str, Any],
    result: object,
    *,
    backward: bool,
) -> Kernel | None:
    """Return the kernel that `operator` runs, or None if it only makes a view."""
    given = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not made or (_only_views(given, made) and not operator._schema.is_mutable):
        return None
    name: str = operator._overloadpacket.__name__
    dtype = _format(made, given)
    if name.startswith(FLASH):
        operands = arguments[1:4] if backward else arguments[:3]
        return flash_attention(
            _heads(operands),
            dtype,
            causal=_is_causal(operator, arguments, keywords),
            backward=backward,
        )
    kind = _kind(name)
    counted = flop_registry.get(operator._overloadpacket)
    if counted is not None:
        kind, flops = KernelKind.MATMUL, int(counted(*arguments, **keywords, out_val=result))
    else:
        flops = sum(each.numel() for each in made if each.is_floating_point())
    if kind is KernelKind.EMBEDDING and not backward:
        given = [made[0], *given[1:]]  # only the looked-up rows are read
    return Kernel(
        kind=kind,
        flops=flops,
        bytes=sum(_touched(each) for each in [*given, *made]),
        dtype=dtype,
        shape=_extents(name, arguments) if counted is not None else tuple(made[0].shape),
        backward=backward,
    )


def _is_causal(operator: Any, arguments: Arguments, keywords: Mapping[str, Any]) -> bool:  # noqa: ANN401
    """Return True if attention has a causal mask; False by default."""
    if "is_causal" in keywords:
        return bool(keywords["is_causal"])
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("is_causal")
    return bool(arguments[place]) if place < len(arguments) else False


def _kind(name: str) -> KernelKind:
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return KernelKind.ELEMENTWISE


def _extents(name: str, arguments: Arguments) -> tuple[int, ...]:
    """Return (batch, m, n, k) of a matrix product; () for a convolution."""
    if name not in PRODUCTS:
        return ()
    left, right = arguments[PRODUCTS[name] : PRODUCTS[name] + 2]
    batch = int(left.shape[0]) if left.dim() == 3 else 1
    return (batch, int(left.shape[-2]), int(right.shape[-1]), int(left.shape[-1]))


def _heads(operands: Sequence[Tensor]) -> tuple[int, int, int, int, int, int]:
    """Return attention's shape from queries, keys, values [sequences, heads, tokens, size]."""
    query, key = operands[0].shape, operands[1].shape
    return (query[0], query[1], key[1], query[2], key[2], query[3])


def _only_views(given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    known = {storage_of(each) for each in given}
    return all(storage_of(each) in known for each in made)


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors on one storage share, also on "meta".

    It is unique while the storage lives, since a storage keeps its Python object alive.
    """
    return id(tensor.untyped_storage())


def _touched(tensor: Tensor) -> int:
    """Return the bytes that a kernel touches for `tensor`; repeated elements count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _format(made: Sequence[Tensor], given: Sequence[Tensor]) -> DType:
    """Return the kernel's data type: that of its first float output or input."""
    for tensor in (*made, *given):
        if tensor.is_floating_point() and tensor.dtype in DTYPE_OF_TORCH:
            return DTYPE_OF_TORCH[tensor.dtype]
    return DType.FP32
