"""Names of mesh axes, groups and random generators in generated schedules."""

from typing import Final

from zsim.model.generator import Draws

DATA = "data"
TENSOR = "tensor"
REPLICATE = "replicate"
PIPELINE = "pipeline"
INNER = "inner"
OUTER = "outer"
CONTEXT = "context"
"""Mesh axes, and the groups along each. If the data axis is split, its parts are outer and inner,
or outer and context: ranks that share a sequence are neighbors.
"""
EMBEDDING = "embedding"
"""The group of a pipeline's first and last stage, which both hold a tied embedding."""
WORLD = "world"
REPLICA = "replica"
"""The group of all ranks, and the group of the ranks that hold the model states once."""
SYMMETRIC = "symmetric_memory"
"""The buffer from which other ranks of the tensor axis copy."""
GENERATOR: Final = {Draws.ALIKE: "default", Draws.APART: "model-parallel"}
"""Generators of random numbers, as Megatron-LM calls them (`core/tensor_parallel/random.py`)."""
