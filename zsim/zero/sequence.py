"""Hidden states cut by tokens over the tensor axis: gathered where all are read, then scattered.

Korthikanti et al. 2022, section 4.2.2: in place of each all-reduce of tensor parallelism there is
a reduce-scatter where summands end, and an all-gather where attention, MLP or head begin; backward
has them the other way round. All are on the compute stream: what follows needs them at once.

What linear layers in 8-bit floats read may be cast to them before it is gathered, with one scale
for the tokens of all ranks: the largest magnitude, of an all-reduce. The gradient of what they
scatter is gathered so, too (torchao 0.19, torchao/float8/float8_tensor_parallel.py).
"""

from collections import Counter
from collections.abc import Container, Iterable
from itertools import accumulate

from zsim.dtype import DType
from zsim.model.kernel import KernelKind, streaming
from zsim.model.model import Model, Segment
from zsim.schedule.operation import Action, Edge, Reduction, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.bucket import UnitRun
from zsim.zero.names import TENSOR
from zsim.zero.visit_order import SegmentVisit, ValueInstance


def shared_parameters(model: Model) -> frozenset[str]:
    """Return parameters that ranks have copies of, and gradients of different tokens."""
    if not any(value.tensor_sharded for value in model.values.values()):
        return frozenset()
    return frozenset(each.name for each in model.parameters if not each.tensor_sharded)


def shared_views(run: UnitRun, buffer: str, shared: Container[str]) -> tuple[tuple[str, View], ...]:
    """Return those parameters of `run` that are `shared`, and where their gradients lie.

    `buffer` holds gradients of the trained parameters of the run, one after the other.
    """
    sizes = [each.elements for each in run.trained]
    return tuple(
        (each.name, View(buffer=buffer, start=start, size=each.elements))
        for each, start in zip(run.trained, accumulate(sizes, initial=0), strict=False)
        if each.name in shared
    )


def sum_over_tokens(
    writer: ScheduleWriter, gradients: Iterable[tuple[str, View]], *, after: Iterable[Edge] = ()
) -> list[str]:
    """Sum gradients of parameters that ranks have copies of, each by itself and in place.

    Each rank has made them of its own tokens. The first sum comes `after` others.
    """
    done: list[str] = []
    for name, view in gradients:
        path, edges = f"sum/{view.buffer}/{name}", () if done else after
        done.append(writer.all_reduce(path, TENSOR, view, stream=COMPUTE, after=edges))
    return done


def _gathers(model: Model) -> dict[tuple[str, int], int]:
    """Return which gather of a value a segment reads, where others have gathered it before."""
    found: dict[tuple[str, int], int] = {}
    for unit in model.units:
        counts, is_left = Counter[str](), False
        for place, segment in enumerate(unit.segments):
            for name in segment.inputs if segment.reads_whole else ():
                counts[name] += not (is_left and counts[name])
                found[name, place] = counts[name] - 1
            is_left = segment.leaves_whole
    return found


class Tokens:
    """Writes these collectives into a writer, and names the buffers of what is whole.

    `scattered` are the values whose summands of all tokens are reduced to a rank's own, `shared`
    the parameters of which each rank has a copy, and a gradient of its own tokens alone.
    """

    def __init__(self, writer: ScheduleWriter, model: Model) -> None:
        self.writer = writer
        self.model = model
        self.scattered = frozenset(
            value.name
            for unit in model.units
            for segment in unit.segments
            if segment.reduces_output
            for value in segment.outputs
            if value.tensor_sharded
        )
        self.shared = shared_parameters(model)
        casting = [each for unit in model.units for each in unit.segments if each.casts_tokens]
        self._cast_inputs = {name for each in casting for name in each.inputs}
        self._cast_outputs = {value.name for each in casting for value in each.outputs}
        self._gathers = _gathers(model)

    def gathers(self, segment: Segment, value: str) -> bool:
        """Tell whether `segment` reads the tokens of all ranks of its input `value`."""
        return segment.reads_whole and self.model.values[value].tensor_sharded

    def gather_inputs(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Gather what `segment` reads whole; the buffers that hold it and end with the segment."""
        found = {
            self.read(part, each): each for each in part.reads if self.gathers(segment, each.value)
        }
        for whole, each in found.items():
            if whole not in self.writer.alive:  # the segment before has left it
                narrow = each.value in self._cast_inputs
                self._gather(each.value, whole, each.buffer, part, narrow=narrow)
        is_left = segment.leaves_whole and part.action is not Action.BACKWARD
        return () if is_left else tuple(found)

    def gather_gradients(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Gather the gradients of what it scattered, as far as they are in `gradients`."""
        return tuple(
            self._gather(
                each.name,
                self.gradient(each.name),
                f"{each.name}/gradient",
                part,
                narrow=each.name in self._cast_outputs,
            )
            for each in segment.outputs
            if each.name in gradients and each.name in self.scattered
        )

    def _gather(
        self, value: str, whole: str, buffer: str, part: SegmentVisit, *, narrow: bool
    ) -> str:
        """Gather `buffer`, which is `value` or its gradient, into `whole`, taken here."""
        path = f"{part.action}{part.segment}/gather/{buffer}"
        own = self._cast(value, buffer, path, name=whole) if narrow else buffer
        self.writer.allocate(whole)
        self.writer.all_gather(path, TENSOR, own, whole, stream=COMPUTE)
        if narrow:
            self.writer.free(own)
        return whole

    def _cast(self, value: str, buffer: str, path: str, *, name: str) -> str:
        """Return a copy of the own tokens of `value` in 8-bit floats, which is taken here."""
        # hp_tensor_to_float8_dynamic (torchao/float8/float8_scaling_utils.py), of a DTensor: its
        # largest magnitude is a number that is not reduced yet, until it is used
        writer, kept = self.writer, self.model.values[value]
        largest = writer.buffer(f"{name}/amax", 1, kept.dtype, Kind.WORKSPACE)
        writer.allocate(largest)
        writer.compute(
            f"{path}/amax",
            Action.AMAX,
            [(Role.INPUT, writer.all(buffer)), (Role.OUTPUT, writer.all(largest))],
            kernels=(streaming(KernelKind.ELEMENTWISE, (kept.elements,), kept.dtype, streams=1),),
        )
        maximum = Reduction.MAX
        writer.all_reduce(f"{path}/amax/reduce", TENSOR, largest, reduction=maximum, stream=COMPUTE)
        cast = writer.buffer(f"{name}/own", kept.elements, DType.FP8, Kind.WORKSPACE)
        writer.allocate(cast)
        writer.copy(f"{path}/cast", buffer, cast)
        writer.free(largest)
        return cast

    def scatter(self, value: str, buffer: str, path: str) -> None:
        """Reduce the summands of `buffer`, which is taken here; theirs are given back."""
        summands = self.summands(value, buffer)
        self.writer.allocate(buffer)
        self.writer.reduce_scatter(path, TENSOR, summands, buffer, stream=COMPUTE)
        self.writer.free(summands)

    def keep_own(self, value: str, buffer: str, path: str) -> None:
        """Copy the own part of a gradient that all ranks have whole; `buffer` is taken here."""
        whole, own = self.summands(value, buffer), self.model.values[value].elements
        self.writer.allocate(buffer)
        view = View(buffer=whole, size=own, axis=TENSOR)
        self.writer.copy(path, view, buffer)
        self.writer.free(whole)

    def read(self, part: SegmentVisit, instance: ValueInstance) -> str:
        """Return the buffer of all tokens of what `part` reads, one for each pass."""
        number = self._gathers.get((instance.value, part.segment), 0)
        name = f"{instance.buffer}/{part.action}/whole{number or ''}"
        narrow = instance.value in self._cast_inputs
        return self._all_tokens(instance.value, name, produced=False, narrow=narrow)

    def gradient(self, value: str) -> str:
        """Return the buffer of the gradients of all tokens of `value`."""
        narrow = value in self._cast_outputs
        return self._all_tokens(value, f"{value}/gradient/whole", produced=False, narrow=narrow)

    def summands(self, value: str, buffer: str) -> str:
        """Return the buffer of summands of all tokens of `buffer`."""
        return self._all_tokens(value, f"{buffer}/summands", produced=True)

    def _all_tokens(self, value: str, name: str, *, produced: bool, narrow: bool = False) -> str:
        own = self.model.values[value]
        elements, dtype = own.elements * self.model.tensor, DType.FP8 if narrow else own.dtype
        return self.writer.buffer(name, elements, dtype, Kind.WORKSPACE, produced=produced)
