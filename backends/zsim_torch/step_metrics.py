"""Numbers that a trainer gives `on_step` after each step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Numbers of a step on this rank.

    Tensors have one number each; to read one of a GPU waits for it. `gradient_norm` is that of all
    gradients before they are clipped, None if the schedule does not clip.
    """

    step: int
    loss: torch.Tensor
    gradient_norm: torch.Tensor | None
    learning_rates: Mapping[str, float]
