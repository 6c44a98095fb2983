"""The transformer of a job on this rank: its module, units and initial values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn

from zsim.backend.backend import Job, RefusedError
from zsim_torch.equal_start import need_equal_seed
from zsim_torch.execute.shard_compute import Initial
from zsim_torch.module.context_place import ContextPlace
from zsim_torch.module.routed_rows import ExpertPlace
from zsim_torch.module.tensor_part import TensorPlace
from zsim_torch.module.transformer import initial_value, transformer
from zsim_torch.module.transformer_segment import (
    SegmentedDecoder,
    is_of_experts,
    is_segmented,
)
from zsim_torch.module.unit import UnitChoice


@dataclass(frozen=True, slots=True)
class JobModule:
    """A module on "meta", its units, and the initial values of its parameters."""

    module: nn.Module
    units: Sequence[UnitChoice]
    initial: Initial

    @classmethod
    def of(cls, job: Job, *, seed: int) -> "JobModule":
        """Return the module of this rank.

        With a tensor axis, it has this rank's part of each matrix.

        Raises:
            RefusedError: the model of the job is not a transformer, or ranks have different seeds.
        """
        need_equal_seed(seed)
        shape = job.model.architecture
        if shape is None:
            raise RefusedError("model: its units are not those of a transformer, so nothing runs")
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        coordinates = job.schedule.mesh.coordinates(rank)
        place = TensorPlace.of(job.schedule, coordinates)
        experts = ExpertPlace.of(job.schedule, coordinates)
        whole = transformer(shape, seed=None)
        sizes = {name: parameter.shape for name, parameter in whole.named_parameters()}

        def initial(name: str) -> torch.Tensor:
            value = initial_value(shape, name, sizes[name], seed=seed)
            if is_of_experts(name):
                return value[experts.own(len(value))]
            return place.part(shape, name, value)

        if is_segmented(job.model, job.schedule.mesh):
            context = ContextPlace.of(job.schedule, coordinates)
            segmented = SegmentedDecoder(job.model, place, context, experts)
            return cls(segmented, segmented.units, initial)
        return cls(whole, whole.units, initial)
