"""Transformers that fit a strategy, in what it cuts and keeps."""

from zsim.architecture import Architecture
from zsim.model import Model
from zsim.strategy import Strategy
from zsim.transformer import transformer


def fitting(shape: Architecture, strategy: Strategy) -> Model:
    """The model of `shape` that `strategy` trains, one sequence at a time."""
    return transformer(
        shape,
        micro_batch_size=1,
        tensor=strategy.tensor,
        precision=strategy.precision,
        sequence=strategy.cuts_tokens,
        keeps_whole=strategy.keeps_whole,
        in_place_loss=strategy.in_place_loss,
    )
