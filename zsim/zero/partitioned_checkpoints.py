"""ZeRO-R Pa: a rank keeps its own slice of a checkpoint and gathers it before the unit runs again.

Rajbhandari et al. 2020, section 6.1. Ranks of the tensor axis hold copies of what flows between
units, so each needs to keep a part alone: an all-gather before recompute makes it whole.
"""

from zsim.model.model import Model, ModelError
from zsim.schedule.operation import Edge, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.names import TENSOR
from zsim.zero.visit_order import Made, ValueInstance


def own_elements(model: Model, strategy: Strategy, value: str) -> int:
    """Return elements of a checkpoint that a rank keeps.

    Raises:
        ModelError: ranks of the tensor axis do not divide it.
    """
    elements = model.values[value].elements
    if not strategy.cuts_checkpoints:
        return elements
    if elements % model.tensor:
        raise ModelError(
            f"activations.partition: {value} has {elements} elements, "
            f"not a multiple of the {model.tensor} ranks of the tensor axis"
        )
    return elements // model.tensor


def own_slice(model: Model, strategy: Strategy, value: str) -> View:
    """Return the share of what forward made that the rank keeps."""
    size = own_elements(model, strategy, value)
    return View(buffer=value, size=size, axis=TENSOR if strategy.cuts_checkpoints else None)


def gather(
    writer: ScheduleWriter, model: Model, value: str, *, source: View, after: tuple[Edge, ...] = ()
) -> str:
    """Make a checkpoint whole again of every rank's `source`; the operation."""
    whole = model.values[value]
    name = writer.buffer(
        ValueInstance(value, Made.GATHERED).buffer, whole.elements, whole.dtype, Kind.SAVED
    )
    writer.allocate(name)
    return writer.all_gather(f"gather/{value}", TENSOR, source, name, stream=COMPUTE, after=after)
