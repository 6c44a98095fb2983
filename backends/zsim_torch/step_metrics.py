"""Metrics that a trainer passes to `on_step` after each step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of a step on this rank.

    Tensors are scalars on the device; reading one on a GPU synchronizes. `gradient_norm` is the
    norm of all gradients before clipping, or None if the schedule does not clip.
    """

    step: int
    loss: torch.Tensor
    gradient_norm: torch.Tensor | None
    learning_rates: Mapping[str, float]
