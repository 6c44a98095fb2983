"""Number formats of a schedule as torch has them."""

import torch
from torch.utils._pytree import tree_map

from zsim.dtype import DType

TORCH_DTYPE = {
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
    """Return `batch` as units are given it that have parameters in the format `parameters`.

    Under mixed precision its tensors of floats are cast to that format, as the root module does
    under FSDP2's `MixedPrecisionPolicy(cast_forward_inputs=True)`, targets too; all else stays.
    """
    if parameters is None or parameters not in HALF_PRECISION:
        return batch
    dtype = TORCH_DTYPE[parameters]

    def cast(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(cast, batch)
