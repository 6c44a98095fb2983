"""Transformers that fit a strategy, in what it cuts and keeps."""

from zsim.model.architecture import Architecture
from zsim.model.model import Model
from zsim.model.transformer import transformer
from zsim.strategy.strategy import Strategy


def fitting(shape: Architecture, strategy: Strategy, *, sequences: int = 1) -> Model:
    """The model of `shape` that `strategy` trains, so many sequences at a time."""
    return transformer(
        shape,
        micro_batch_size=sequences,
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
        sequence=strategy.cuts_tokens,
        keeps_gathered=strategy.keeps_gathered,
        in_place_loss=strategy.in_place_loss,
    )
