"""Data types of a schedule as torch data types."""

import torch
from torch.utils._pytree import tree_map

from zsim.dtype import DType

TORCH_DTYPE = {
    DType.NF4: torch.uint8,
    DType.INT8: torch.int8,
    DType.FP8: torch.float8_e4m3fn,
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.FP32: torch.float32,
    DType.FP64: torch.float64,
    DType.INT64: torch.int64,
}
assert set(TORCH_DTYPE) == set(DType)

DTYPE_OF_TORCH = {value: key for key, value in TORCH_DTYPE.items()}

HALF_PRECISION = (DType.FP16, DType.BF16)


def entering(batch: object, parameters: DType | None) -> object:
    """Return `batch` as passed to units whose parameters have the data type `parameters`.

    Under mixed precision, its float tensors are cast to that type, including targets, as the root
    module does under FSDP2's `MixedPrecisionPolicy(cast_forward_inputs=True)`. Other tensors stay.
    """
    if parameters is None or parameters not in HALF_PRECISION:
        return batch
    dtype = TORCH_DTYPE[parameters]

    def cast(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(cast, batch)
