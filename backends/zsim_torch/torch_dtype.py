"""Number formats of a schedule as torch has them."""

import torch

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
