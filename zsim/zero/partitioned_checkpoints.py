"""ZeRO-R Pa: a rank keeps its own slice of a checkpoint, and gathers it before recompute.

Rajbhandari et al. 2020, section 6.1. Ranks of the tensor axis hold identical copies of the values
between units, so each rank needs to keep only a slice. An all-gather before recompute makes the
checkpoint whole.
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
    """Return the number of elements of a checkpoint that a rank keeps.

    Raises:
        ModelError: the number of elements is not a multiple of the tensor degree.
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
    """Return the view of the rank's share of a forward output."""
    size = own_elements(model, strategy, value)
    return View(buffer=value, size=size, axis=TENSOR if strategy.cuts_checkpoints else None)


def gather(
    writer: ScheduleWriter, model: Model, value: str, *, source: View, after: tuple[Edge, ...] = ()
) -> str:
    """All-gather a checkpoint from every rank's `source`; return the operation."""
    whole = model.values[value]
    name = writer.buffer(
        ValueInstance(value, Made.GATHERED).buffer, whole.elements, whole.dtype, Kind.SAVED
    )
    writer.allocate(name)
    return writer.all_gather(f"gather/{value}", TENSOR, source, name, stream=COMPUTE, after=after)
