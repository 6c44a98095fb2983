"""Axes of ranks that a model is cut over."""

from zsim.strategy.config_table import Count, Table


class ParallelAxes(Table):
    """Keys of `[parallel]` that a file and a `Strategy` write alike.

    Attributes:
        tensor: ranks of the tensor axis, inside units (Shoeybi et al. 2019, section 3).
        context: ranks of the data axis that share each sequence (Liu et al. 2023).
        pipeline: stages that the units are split over, each on ranks of its own (Narayanan et al.
            2021, section 2.2).
        replicate: replicas of the sharded model states, each with other data: gradients are reduced
            over the data axis, then over the replicas (hybrid sharding, Zhao et al. 2023, section
            3.2.2; MiCS, Zhang et al. 2022).
    """

    tensor: Count = 1
    context: Count = 1
    pipeline: Count = 1
    replicate: Count = 1
