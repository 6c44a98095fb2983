"""Hidden states cut by tokens over the tensor axis: gathered where all are read, then scattered.

Korthikanti et al. 2022, section 4.2.2: in place of each all-reduce of tensor parallelism there is
a reduce-scatter where summands end, and an all-gather where attention, MLP or head begin; backward
has them the other way round. All are on the compute stream: what follows needs them at once.

What linear layers in 8-bit floats read may be cast to them before it is gathered, with one scale
for the tokens of all ranks: the largest magnitude, of an all-reduce. The gradient of what they
scatter is gathered so, too (torchao 0.19, torchao/float8/float8_tensor_parallel.py).

Those with which products are fused (`Kernel.part`) are on a stream of copies: a rank puts its own
tokens into symmetric memory, from where others copy them, each while it multiplies what has come
(`_pipelined_multi_all_gather_and_consume` and `_pipelined_produce_and_all2all`, torch 2.13,
torch/distributed/_symmetric_memory/__init__.py).
"""

from collections import Counter
from collections.abc import Container, Iterable
from itertools import accumulate

from zsim.dtype import DType
from zsim.model.kernel import FusedPart, KernelKind, parts_of, streaming
from zsim.model.model import Model, Segment
from zsim.schedule.operation import Action, Edge, Operand, Reduction, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import UnitRun
from zsim.zero.names import SYMMETRIC, TENSOR
from zsim.zero.visit_order import SegmentVisit, ValueInstance

TOKEN_COPIES = "token_copies"
"""The stream of copies from the symmetric memory of other ranks of the tensor axis."""


def token_streams(strategy: Strategy) -> tuple[str, ...]:
    """Return the stream of copies between tensor ranks, where products are fused with them."""
    fuses = strategy.cuts_tokens and strategy.execution.fuses_tokens
    return (TOKEN_COPIES,) if fuses else ()


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
        self._awaited: list[str] = []
        self._take_symmetric_memory()

    def _take_symmetric_memory(self) -> None:
        """Take the memory that other ranks copy from, once for all chunks of a role.

        It holds a rank's own tokens, or summands for two ranks: those that are copied, and those
        that are being made (`get_symm_mem_workspace`).
        """
        values = self.model.values
        fused = [
            (each, values[name])
            for unit in self.model.units
            for each in unit.segments
            if parts_of(each.forward)
            for name in (*each.inputs, *(value.name for value in each.outputs))
            if values[name].tensor_sharded
        ]
        self._fuses = bool(fused)
        if not fused or SYMMETRIC in self.writer.alive:
            return
        dtype = DType.FP8 if fused[0][0].casts_tokens else fused[0][1].dtype
        most = 2 * max(value.size_bytes for _, value in fused)
        self.writer.prefix = "setup"
        self.writer.buffer(SYMMETRIC, most // dtype.size_bytes, dtype, Kind.WORKSPACE)
        self.writer.persist(SYMMETRIC)

    def gathers(self, segment: Segment, value: str) -> bool:
        """Tell whether `segment` reads the tokens of all ranks of its input `value`."""
        return segment.reads_whole and self.model.values[value].tensor_sharded

    def gather_inputs(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Gather what `segment` reads whole; the buffers that hold it and end with the segment."""
        found = {
            self.read(part, each): each for each in part.reads if self.gathers(segment, each.value)
        }
        in_parts = self._has(FusedPart.GATHERED, segment, part)
        for whole, each in found.items():
            if whole not in self.writer.alive:  # the segment before has left it
                narrow = each.value in self._cast_inputs
                self._gather(each.value, whole, each.buffer, part, narrow=narrow, in_parts=in_parts)
        is_left = segment.leaves_whole and part.action is not Action.BACKWARD
        return () if is_left else tuple(found)

    def gather_gradients(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Gather the gradients of what it scattered, as far as they are in `gradients`."""
        in_parts = self._has(FusedPart.GRADIENT, segment, part)
        return tuple(
            self._gather(
                each.name,
                self.gradient(each.name),
                f"{each.name}/gradient",
                part,
                narrow=each.name in self._cast_outputs,
                in_parts=in_parts,
            )
            for each in segment.outputs
            if each.name in gradients and each.name in self.scattered
        )

    def _gather(
        self,
        value: str,
        whole: str,
        buffer: str,
        part: SegmentVisit,
        *,
        narrow: bool,
        in_parts: bool,
    ) -> str:
        """Gather `buffer`, which is `value` or its gradient, into `whole`, taken here."""
        path = f"{part.action}{part.segment}/gather/{buffer}"
        own = self._cast(value, buffer, path, name=whole) if narrow else buffer
        self.writer.allocate(whole)
        if in_parts:
            self._gather_parts(path, own, whole)
        else:
            self.writer.all_gather(path, TENSOR, own, whole, stream=COMPUTE)
        if narrow:
            self.writer.free(own)
        return whole

    def _gather_parts(self, path: str, own: str, whole: str) -> None:
        """Gather `own` by copies, for the next `Compute` of a segment, which is fused with it."""
        writer = self.writer
        elements = writer.buffers[own].elements  # tokens and a gradient may be on their way at once
        start = elements * len(self._awaited)
        from_here = View(buffer=SYMMETRIC, start=start, size=elements)
        shared = writer.copy(f"{path}/share", own, from_here)
        self._awaited.append(
            writer.all_gather(
                path,
                TENSOR,
                from_here,
                whole,
                in_parts=True,
                stream=TOKEN_COPIES,
                after=(shared,),
            )
        )

    def come(self) -> tuple[Edge, ...]:
        """Return what the next `Compute` of a segment is fused with, which waits for it."""
        came, self._awaited = tuple(self._awaited), []
        return came

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

    def scatters_parts(self, segment: Segment, part: SegmentVisit) -> bool:
        """Tell whether `part` makes what it scatters part by part."""
        return self._has(FusedPart.SCATTERED, segment, part)

    def _has(self, which: FusedPart, segment: Segment, part: SegmentVisit) -> bool:
        """Tell whether kernels that `part` runs have parts of that kind."""
        if not self._fuses:
            return False
        again = part.action is Action.RECOMPUTE
        is_backward = part.action is Action.BACKWARD
        kernels = segment.backward if is_backward else segment.forward_kernels(again=again)
        return which in parts_of(kernels)

    def parts_made(self, segment: Segment, part: SegmentVisit) -> list[Operand]:
        """Return the operand in which parts are made that others copy, if they are so."""
        if not self.scatters_parts(segment, part):
            return []
        return [Operand(role=Role.WORKSPACE, view=self.writer.all(SYMMETRIC))]

    def scatter(self, value: str, buffer: str, path: str, *, fused: Edge | None = None) -> None:
        """Reduce the summands of `buffer`, which is taken here; theirs are given back.

        It may be `fused` with the `Compute` that makes them.
        """
        writer, summands = self.writer, self.summands(value, buffer)
        writer.allocate(buffer)
        if fused is None:
            writer.reduce_scatter(path, TENSOR, summands, buffer, stream=COMPUTE)
            writer.free(summands)
            return
        done = writer.reduce_scatter(
            path, TENSOR, summands, buffer, in_parts=True, stream=TOKEN_COPIES, after=(fused,)
        )
        writer.free(summands, uses=(done,))

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
