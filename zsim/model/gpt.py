"""The `Model` of a GPT."""

from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.model.transformer import transformer
from zsim.strategy.precision import Precision


def gpt(
    shape: GPT, *, micro_batch_size: int, tensor: int = 1, precision: Precision = Precision.FP32
) -> Model:
    """Return the model of `shape` for `micro_batch_size` sequences on `tensor` ranks.

    Raises:
        ModelError: `tensor` does not divide the attention heads.
    """
    return transformer(shape, micro_batch_size=micro_batch_size, tensor=tensor, precision=precision)
