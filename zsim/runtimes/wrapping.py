"""What both FSDPs share: parameters wrapped by block or in the root, shards that are updated."""

from collections.abc import Mapping, Sequence

from zsim.model.model import BATCH, Model, Parameter
from zsim.schedule.operation import Edge
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.optimizer_step import Ending, Trained
from zsim.zero.reduce import Reduced
from zsim.zero.state import BucketState
from zsim.zero.writer import COMPUTE, Draft


def groups(model: Model) -> list[list[Parameter]]:
    """The parameters of each wrapped module: of every block its own, of the root all others.

    Blocks are the units that checkpointing treats alone. A parameter that several units use is the
    root's.
    """
    users: dict[str, list[int]] = {}
    for index, unit in enumerate(model.units):
        for parameter in unit.parameters:
            users.setdefault(parameter.name, []).append(index)

    def block_of(parameter: Parameter) -> int | None:
        first, *others = users[parameter.name]
        return first if not others and model.units[first].checkpoint else None

    found: dict[int | None, list[Parameter]] = {}
    for parameter in model.parameters:
        found.setdefault(block_of(parameter), []).append(parameter)
    return list(found.values())


class Wrapping:
    """Which bucket is which block's, and which the root's.

    Attributes:
        order: buckets of the blocks, in the order of forward.
        root: the root's bucket; None if every parameter is a block's.
    """

    def __init__(self, model: Model, buckets: Buckets) -> None:
        self._model = model
        self._buckets = buckets
        blocks = [self.block(unit) for unit in range(len(model.units))]
        self.order = [block for block in blocks if block is not None]
        roots = [bucket.index for bucket in buckets.all if bucket.index not in self.order]
        self.root = roots[0] if roots else None

    def block(self, unit: int) -> int | None:
        """The bucket of the block that a unit is; none of a unit that belongs to the root."""
        if not self._model.units[unit].checkpoint:
            return None
        own = [run.bucket for run in self._buckets.runs[unit]]
        return next((number for number in own if self._buckets.all[number].units == (unit,)), None)

    def has_input_gradient(self, unit: int) -> bool:
        """Whether autograd computes a gradient of what the unit is given."""
        segments = self._model.units[unit].segments
        own = {value.name for segment in segments for value in segment.outputs}
        given = {name for segment in segments for name in segment.inputs} - own - {BATCH}
        return any(self._model.values[name].requires_gradient for name in given)


def write_ending(
    draft: Draft,
    strategy: Strategy,
    *,
    buckets: Buckets,
    states: Sequence[BucketState],
    reduced: Mapping[int, Reduced],
) -> None:
    """Update every trained shard as an optimizer of PyTorch does, on the compute stream."""
    trained = [
        Trained(
            name=bucket.name,
            layout=bucket.layout,
            gradient=draft.all(reduced[bucket.index].buffer),
            measured=draft.all(reduced[bucket.index].buffer),
            after=(reduced[bucket.index].operation,),
            parameter=draft.all(state.parameter),
            master=None,
            moments=tuple(draft.all(moment) for moment in state.moments),
        )
        for bucket, state in zip(buckets.all, states, strict=True)
        if not bucket.frozen
    ]
    after: tuple[Edge, ...] = tuple(item.operation for item in reduced.values())
    Ending(draft, strategy, trained, measured_after=after, stream=COMPUTE).write()
