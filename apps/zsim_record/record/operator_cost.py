"""Model a torch operator as a kernel for the simulation: FLOPs and bytes from its shapes."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind, flash_attention, matmul
from zsim_record.lift.lifted_call import DTYPES
from zsim_record.record.operator_access import tensors_in

aten = torch.ops.aten
Shape = tuple[int, ...]
PRODUCTS: dict[object, Callable[..., tuple[int, int, int, int]]] = {
    aten.mm: lambda a, b, *_: (1, a[0], b[1], a[1]),
    aten.addmm: lambda _, a, b, *__: (1, a[0], b[1], a[1]),
    aten.bmm: lambda a, b, *_: (a[0], a[1], b[2], a[2]),
    aten.baddbmm: lambda _, a, b, *__: (a[0], a[1], b[2], a[2]),
}
"""Matrix products by operator: batch, m, n and k from the shapes of their tensors."""
ATTENTION = "aten::_scaled_dot_product_"
"""Prefix of the names of fused attention operators."""
KINDS = {
    "embedding": KernelKind.EMBEDDING,
    "softmax": KernelKind.SOFTMAX,
    "norm": KernelKind.NORM,
    "gelu": KernelKind.ACTIVATION,
    "silu": KernelKind.ACTIVATION,
}
"""Kinds of kernels by a part of the operator's name; all others are elementwise."""


def kernel_of(
    func: torch._ops.OpOverload, args: Sequence[Any], moved: Iterable[torch.Tensor], result: object
) -> Kernel:
    """Return the kernel of `func`, which reads or writes each tensor in `moved` once.

    FLOPs of convolutions come from `torch.utils.flop_counter`.
    """
    tensors = list(moved)
    size = sum(_bytes(each) for each in tensors)
    dtype = _dtype(tensors)
    packet = func._overloadpacket
    if packet in PRODUCTS:
        shapes = [tuple(each.shape) for each in tensors_in(args)]
        batch, m, n, k = PRODUCTS[packet](*shapes)
        return matmul(m, n, k, dtype, batch=batch)
    if ATTENTION in func._schema.name:
        return _attention(func, args, dtype)
    counts: Any = flop_registry.get(packet)
    if counts is not None:
        flops = int(counts(*args, out_val=result))
        return Kernel(kind=KernelKind.MATMUL, flops=flops, bytes=size, dtype=dtype)
    name = func._schema.name
    kind = next((each for word, each in KINDS.items() if word in name), KernelKind.ELEMENTWISE)
    largest = max((each.numel() for each in tensors), default=0)
    return Kernel(kind=kind, flops=largest, bytes=size, dtype=dtype)


def _attention(func: torch._ops.OpOverload, args: Sequence[Any], dtype: DType) -> Kernel:
    """Return the kernel of fused attention; its backward takes a gradient as its first argument."""
    named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
    query, key = tuple(named["query"].shape), tuple(named["key"].shape)
    sequences, heads, queries, size = query
    return flash_attention(
        (sequences, heads, key[1], queries, key[2], size),
        dtype,
        causal=bool(named.get("is_causal")),
        backward="backward" in func._schema.name,
    )


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a view; broadcast dimensions count once."""
    shown = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in shown if stride != 0) * tensor.element_size()


def _dtype(tensors: Sequence[torch.Tensor]) -> DType:
    """Return the data type of the largest floating-point tensor; FP32 if there is none."""
    floats = [each for each in tensors if each.dtype.is_floating_point]
    largest = max(floats, key=lambda each: each.numel(), default=None)
    name = "float32" if largest is None else str(largest.dtype).removeprefix("torch.")
    return DTYPES.get(name, DType.FP32)
