"""Record the input shapes of units while the units are described.

A value that comes from another pipeline stage arrives flat, as buffers hold it.
"""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from zsim_torch.module.unit import TorchUnit

InputShapes = dict[tuple[str, int, int], torch.Size]
"""Shapes by unit, segment and position among the inputs."""


@contextmanager
def noted_input_shapes(units: Iterable[TorchUnit]) -> Generator[InputShapes]:
    """Return a context that records the input shapes of `units`."""
    found: InputShapes = {}
    with ExitStack() as hooks:
        for unit in units:
            hook = unit.module.register_forward_pre_hook(partial(_note, found, unit))
            hooks.callback(hook.remove)
        yield found


def _note(found: InputShapes, unit: TorchUnit, _: nn.Module, inputs: tuple[object, ...]) -> None:
    for place, each in enumerate(inputs):
        if isinstance(each, torch.Tensor):
            found[unit.name, unit.segment, place] = each.shape
