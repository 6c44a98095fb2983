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
EXPERT = "expert"
EXPERT_TENSOR = "expert_tensor"
EXPERT_DATA = "expert_data"
TENSOR_EXPERT = "tensor_expert"
"""Axes of experts, and the groups along each: Megatron-LM's `ep`, `expt_tp` and `expt_dp`. The last
is the group of the first two, its `tp_ep`. Data and tensor axes are cut where these start and end.
"""
EMBEDDING = "embedding"
"""The group of a pipeline's first and last stage, which both hold a tied embedding."""
WORLD = "world"
REPLICA = "replica"
"""The group of all ranks, and the group of the ranks that hold the model states once."""
SYMMETRIC = "symmetric_memory"
"""The buffer from which other ranks of the tensor axis copy."""
SIDE = "shared_experts"
"""The stream of shared experts that run while tokens are exchanged."""
GENERATOR: Final = {Draws.ALIKE: "default", Draws.APART: "model-parallel"}
"""Generators of random numbers, as Megatron-LM calls them (`core/tensor_parallel/random.py`)."""
