"""CUDA graphs of a training step: parts of it that the host launches as one."""

from dataclasses import dataclass
from enum import StrEnum

OF_ITERATION = ("step/forward/", "step/backward/")
"""Prefixes of the names of operations in the graph of a whole iteration."""


class GraphImpl(StrEnum):
    """Megatron-LM's implementations (`--cuda-graph-impl`)."""

    NONE = "none"
    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    FULL_ITERATION = "full_iteration"


class GraphScope(StrEnum):
    """Parts of a step that a graph captures (`--cuda-graph-scope`)."""

    FULL = "full"
    FULL_ITERATION = "full_iteration"
    ATTENTION = "attn"
    MLP = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphs:
    """The parts of a step that are captured.

    Attributes:
        iteration: forward and backward of all micro-batches are one graph, with their collectives.
        attention, mlp: each forward and backward of this half of a block is a graph; with both,
            `joined` tells whether the whole block is one graph.
        joined: a block is one graph, not two.
    """

    iteration: bool = False
    attention: bool = False
    mlp: bool = False
    joined: bool = False
