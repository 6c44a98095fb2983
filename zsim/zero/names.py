"""Names of axes, groups and generators in the schedules of the scheduler."""

from typing import Final

from zsim.model.generator import Draws

DATA = "data"
TENSOR = "tensor"
REPLICATE = "replicate"
PIPELINE = "pipeline"
INNER = "inner"
OUTER = "outer"
CONTEXT = "context"
"""Axes, and the groups along each. Where the data axis is split, its parts are outer and inner, or
outer and context: ranks that share each sequence are neighbours."""
EMBEDDING = "embedding"
"""The group of the first and the last stage of a pipeline, which both have a tied embedding."""
WORLD = "world"
REPLICA = "replica"
"""Groups of all ranks, and of those that hold the model's states once."""
SYMMETRIC = "symmetric_memory"
"""The buffer from which other ranks of the tensor axis copy."""
GENERATOR: Final = {Draws.ALIKE: "default", Draws.APART: "model-parallel"}
"""Generators of random numbers, as Megatron-LM calls them (`core/tensor_parallel/random.py`)."""
