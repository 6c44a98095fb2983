"""Sequence parallelism: hidden states sharded by tokens over the tensor axis.

Korthikanti et al. 2022, section 4.2.2: each all-reduce of tensor parallelism becomes a
reduce-scatter at the end of row-parallel layers and an all-gather before attention, MLP or head;
backward reverses them. All run on the compute stream, because the next kernel needs them at once.

The inputs of float8 linear layers may be cast before the all-gather, with one scale for the tokens
of all ranks: the largest magnitude, from an all-reduce. The gradient of a scattered output is
gathered the same way (torchao 0.19, torchao/float8/float8_tensor_parallel.py).

Collectives fused with GEMMs (`Kernel.part`) run on a stream of copies. A rank writes its own tokens
to symmetric memory, from which other ranks copy; each rank multiplies the tokens that have arrived
(`_pipelined_multi_all_gather_and_consume` and `_pipelined_produce_and_all2all`, torch 2.13,
torch/distributed/_symmetric_memory/__init__.py). NCCL collectives that overlap GEMMs also have a
separate stream. They start after all work issued before them, and the operations after the GEMMs
wait for them (`async_op=True`, `handle.wait()`).
"""

from collections import Counter
from collections.abc import Container, Sequence

from zsim.dtype import DType
from zsim.model.kernel import FusedPart, KernelKind, parts_of, streaming
from zsim.model.model import Model, Segment
from zsim.schedule.operation import Action, Edge, Operand, Reduction, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.execution import TokenFusion
from zsim.strategy.strategy import Strategy
from zsim.zero.gemm_overlap import (
    TOKEN_COLLECTIVES,
    gather_overlapped,
    scatter_overlapped,
    sum_overlapped,
)
from zsim.zero.names import SIDE, SYMMETRIC, TENSOR
from zsim.zero.token_rows import TokenRows
from zsim.zero.userbuffers import Userbuffers
from zsim.zero.visit_order import SegmentVisit, ValueInstance

TOKEN_COPIES = "token_copies"
"""The stream of copies from the symmetric memory of other ranks of the tensor axis."""


def token_streams(strategy: Strategy) -> tuple[str, ...]:
    """Return the stream of collectives that are fused with GEMMs; empty if none are."""
    fused_by = strategy.execution.fuses_tokens
    if fused_by is TokenFusion.NCCL:
        return (TOKEN_COLLECTIVES,) if strategy.parallel.tensor > 1 else ()
    return (TOKEN_COPIES,) if strategy.cuts_tokens and fused_by else ()


def side_streams(model: Model) -> tuple[str, ...]:
    """Return the side stream if a segment of the model runs on it; empty otherwise."""
    has_side = any(segment.side for unit in model.units for segment in unit.segments)
    return (SIDE,) if has_side else ()


def _gathers(model: Model) -> dict[tuple[str, int], int]:
    """Return which gather of a value each segment reads, by (value, place of the segment).

    A segment reuses the previous segment's gather if that one leaves the gathered value.
    """
    found: dict[tuple[str, int], int] = {}
    for unit in model.units:
        counts, is_left = Counter[str](), False
        for place, segment in enumerate(unit.segments):
            for name in segment.inputs if segment.reads_gathered else ():
                counts[name] += not (is_left and counts[name])
                found[name, place] = counts[name] - 1
            is_left = segment.leaves_gathered
    return found


class Tokens:
    """Writes these collectives to `writer`, and names the buffers of all tokens.

    `scattered` are the values whose partial sums of all tokens are reduce-scattered. `shared` are
    the parameters that every rank holds; each rank's gradient of them covers only its own tokens.
    If it `measures`, a cast to 8 bits follows the maximum over all ranks. Collectives that overlap
    no GEMM are on `stream`.
    """

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        fusion: TokenFusion | None = None,
        *,
        measures: bool = True,
        rows: TokenRows | None = None,
    ) -> None:
        self.writer = writer
        self.model = model
        self.stream = COMPUTE
        self._rows = rows or TokenRows(model)
        self._measures = measures
        self.scattered = frozenset(
            value.name
            for unit in model.units
            for segment in unit.segments
            if segment.sums
            for value in segment.outputs
            if value.tensor_sharded
        )
        self.shared = model.summed_copies
        every = [each for unit in model.units for each in unit.segments]
        self._cast_inputs = {
            name for each in every if each.begins and each.begins.narrow for name in each.inputs
        }
        self._cast_outputs = {
            value.name for each in every if each.ends and each.ends.narrow for value in each.outputs
        }
        self._gathers = _gathers(model)
        self._awaited: list[str] = []
        self._userbuffers: Userbuffers | None = None
        self._is_nccl = fusion is TokenFusion.NCCL
        if self._is_nccl:
            self._fuses = True
        elif fusion is TokenFusion.USERBUFFERS:
            self._userbuffers = Userbuffers(writer, model)
            self._fuses = bool(self._userbuffers.names)
        else:
            self._take_symmetric_memory()

    def _take_symmetric_memory(self) -> None:
        """Allocate the symmetric memory that other ranks copy from, once for all chunks of a role.

        It holds a rank's own tokens, or partial sums for two ranks: those being copied and those
        being computed (`get_symm_mem_workspace`).
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
        first, value = fused[0]
        dtype = DType.FP8 if first.is_narrow else value.dtype
        most = 2 * max(value.size_bytes for _, value in fused)
        self.writer.prefix = "setup"
        self.writer.buffer(SYMMETRIC, most // dtype.size_bytes, dtype, Kind.WORKSPACE)
        self.writer.persist(SYMMETRIC)

    def changes(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` reads the tokens of all ranks of its input `value`."""
        return segment.reads_gathered and self.model.values[value].tensor_sharded

    def contributes(self, segment: Segment, value: str) -> bool:
        """Return True: each rank's gradient is of its own values."""
        del segment, value
        return True

    def partial(self, segment: Segment, value: str) -> tuple[str, ...]:
        """Return the tensor axis if gradients are summed over it."""
        del value
        return (TENSOR,) if segment.sums_gradients else ()

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Gather the inputs `segment` reads whole; return the buffers to free after the segment."""
        return self._gather_whole(segment, part)

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Gather inputs again, and the gradients of scattered outputs that are in `gradients`.

        If collectives overlap GEMMs, gradients come first. Return the buffers to free.
        """
        if self._gathers_later(part):
            return self._gather_gradients(segment, part, gradients)
        whole = self._gather_whole(segment, part)
        return (*whole, *self._gather_gradients(segment, part, gradients))

    def made_by_backward(self, segment: Segment, value: str, contribution: str) -> str:
        """Return the buffer of partial sums of the gradients of all tokens."""
        return self.summands(value, contribution, read_by=segment)

    def end(
        self,
        segment: Segment,
        part: SegmentVisit,
        made: Sequence[tuple[str, str]],
        operation: str,
    ) -> None:
        """Sum the outputs over ranks, and scatter those that are sharded by tokens."""
        fused = operation if self.scatters_parts(segment, part) else None
        for value, buffer in made:
            self.reduce(value, buffer, f"{part.action}{part.segment}", fused=fused)

    def settle(self, segment: Segment, part: SegmentVisit, value: str, gradient: str) -> None:
        """Sum the gradient of an input over ranks, or keep the rank's own part of it."""
        path = f"backward{part.segment}"
        if segment.sums_gradients:
            is_fused = self.scatters_gradients(segment, part)
            fused = self.writer.path(path) if is_fused else None
            self.reduce(value, gradient, path, read_by=segment, fused=fused)
        elif self.changes(segment, value):
            self.keep_own(segment, value, gradient, f"{path}/own/{value}")

    def _gathers_later(self, part: SegmentVisit) -> bool:
        """Return True if gradients are gathered first, and inputs during a later GEMM."""
        is_later = self._is_nccl or self._userbuffers is not None
        return is_later and part.action is Action.BACKWARD

    def _gather_whole(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        found = {
            self.read(segment, part, each): each
            for each in part.reads
            if self.changes(segment, each.value)
        }
        in_parts = self._has(segment, part, FusedPart.GATHERED, FusedPart.BESIDE_GATHER)
        for whole, each in found.items():
            # otherwise the previous segment left the gathered value
            if whole not in self.writer.alive or self._stays(whole):
                narrow = each.value in self._cast_inputs
                self._gather(each.value, whole, each.buffer, part, narrow=narrow, in_parts=in_parts)
        is_left = segment.leaves_gathered and part.action is not Action.BACKWARD
        return () if is_left else tuple(each for each in found if not self._stays(each))

    def _gather_gradients(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Gather the gradients of the segment's scattered outputs that are in `gradients`.

        If collectives overlap GEMMs, the inputs are gathered now, too. Return the buffers to free.
        """
        in_parts = self._has(segment, part, FusedPart.GRADIENT)
        found = [
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
        ]
        found += self._gather_whole(segment, part) if self._gathers_later(part) else ()
        return tuple(each for each in found if not self._stays(each))

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
        """Gather `buffer` (`value` or its gradient) into `whole`, allocated and returned here."""
        path = f"{part.action}{part.segment}/gather/{buffer}"
        own = self._cast(value, buffer, path, name=whole) if narrow else buffer
        self.take(whole)
        if self._stays(whole):
            self._gather_in_place(path, own, whole)
        elif in_parts and self._is_nccl:
            done = gather_overlapped(self.writer, path, own, whole)
            self._awaited.append(done)
            if narrow:
                self.writer.free(own, uses=(done,))
            return whole
        elif in_parts:
            self._gather_parts(path, own, whole)
        else:
            self.writer.all_gather(path, TENSOR, own, whole, stream=self.stream)
        if narrow:
            self.writer.free(own)
        return whole

    def _gather_parts(self, path: str, own: str, whole: str) -> None:
        """Gather `own` by copies that are fused with the next `Compute` of a segment."""
        elements = self.writer.buffers[own].elements
        start = elements * len(self._awaited)  # tokens and a gradient may be in flight together
        self._share(path, own, View(buffer=SYMMETRIC, start=start, size=elements), whole)

    def _gather_in_place(self, path: str, own: str, whole: str) -> None:
        """Gather `own` in place in a userbuffer, overlapping the next `Compute`."""
        elements = self.writer.buffers[own].elements
        self._share(path, own, View(buffer=whole, size=elements, axis=TENSOR), whole)

    def _share(self, path: str, own: str, from_here: View, whole: str) -> None:
        """Copy `own` to `from_here`, from which other ranks copy it; copy theirs to `whole`."""
        writer = self.writer
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

    def take(self, *buffers: str) -> None:
        """Allocate the `buffers` that are not persistent."""
        if self._userbuffers is not None:
            buffers = tuple(each for each in buffers if not self._stays(each))
        self.writer.allocate(*buffers)

    def give(self, *buffers: str) -> None:
        """Free the `buffers` that are not persistent."""
        self.writer.free(*(each for each in buffers if not self._stays(each)))

    def _stays(self, buffer: str) -> bool:
        """Return True if `buffer` is a userbuffer, which persists from setup on."""
        return self._userbuffers is not None and buffer in self._userbuffers.names

    def come(self) -> tuple[Edge, ...]:
        """Return the edges that a segment's next `Compute` waits for, or may be fused with."""
        came, self._awaited = tuple(self._awaited), []
        return came

    def _cast(self, value: str, buffer: str, path: str, *, name: str) -> str:
        """Return a newly allocated float8 copy of this rank's tokens of `value`."""
        # hp_tensor_to_float8_dynamic (torchao/float8/float8_scaling_utils.py) on a DTensor: its
        # largest magnitude stays a partial value until it is used.
        writer, kept = self.writer, self.model.values[value]
        if not self._measures:
            return self._cast_copy(value, buffer, path, name=name)
        largest = writer.buffer(f"{name}/amax", 1, kept.dtype, Kind.WORKSPACE)
        writer.allocate(largest)
        writer.compute(
            f"{path}/amax",
            Action.AMAX,
            [(Role.INPUT, writer.all(buffer)), (Role.OUTPUT, writer.all(largest))],
            kernels=(streaming(KernelKind.ELEMENTWISE, (kept.elements,), kept.dtype, streams=1),),
        )
        maximum = Reduction.MAX
        writer.all_reduce(
            f"{path}/amax/reduce", TENSOR, largest, reduction=maximum, stream=self.stream
        )
        cast = self._cast_copy(value, buffer, path, name=name)
        writer.free(largest)
        return cast

    def _cast_copy(self, value: str, buffer: str, path: str, *, name: str) -> str:
        """Return a newly allocated copy of `buffer` in 8 bits."""
        elements = self.model.values[value].elements
        cast = self.writer.buffer(f"{name}/own", elements, DType.FP8, Kind.WORKSPACE)
        self.writer.allocate(cast)
        self.writer.copy(f"{path}/cast", buffer, cast)
        return cast

    def scatters_parts(self, segment: Segment, part: SegmentVisit) -> bool:
        """Return True if `part` produces its scattered output in parts."""
        return self._has(segment, part, FusedPart.SCATTERED, FusedPart.SPLIT)

    def scatters_gradients(self, segment: Segment, part: SegmentVisit) -> bool:
        """Return True if input gradients of `part` are reduce-scattered while it runs."""
        return self._has(segment, part, FusedPart.BESIDE_SCATTER)

    def _has(self, segment: Segment, part: SegmentVisit, *which: FusedPart) -> bool:
        """Return True if the kernels of `part` have parts of one of the kinds `which`."""
        if not self._fuses:
            return False
        again = part.action is Action.RECOMPUTE
        is_backward = part.action is Action.BACKWARD
        kernels = segment.backward if is_backward else segment.forward_kernels(again=again)
        return not parts_of(kernels).isdisjoint(which)

    def parts_made(self, segment: Segment, part: SegmentVisit) -> list[Operand]:
        """Return the operand in symmetric memory that other ranks copy parts from, if any."""
        if self._userbuffers is not None or not self.scatters_parts(segment, part):
            return []
        return [Operand(role=Role.WORKSPACE, view=self.writer.all(SYMMETRIC))]

    def scatter(
        self,
        value: str,
        buffer: str,
        path: str,
        *,
        read_by: Segment | None = None,
        fused: Edge | None = None,
    ) -> None:
        """Reduce-scatter partial sums into `buffer`, allocated here; free the partial sums.

        With `fused`, it overlaps the `Compute` operation that makes them. With `read_by`, `buffer`
        is the gradient of an input of that segment.
        """
        writer, summands = self.writer, self.summands(value, buffer, read_by=read_by)
        writer.allocate(buffer)
        if fused is not None and self._is_nccl:
            self._awaited.append(scatter_overlapped(writer, path, summands, buffer, maker=fused))
            return
        if fused is None:
            writer.reduce_scatter(path, TENSOR, summands, buffer, stream=self.stream)
            writer.free(summands)
            return
        if read_by is not None:  # `ub_obj_wgrad.get_buffer(local_chunk=True).clone()`
            own = View(buffer=summands, size=writer.buffers[buffer].elements, axis=TENSOR)
            done = writer.reduce_scatter(
                path, TENSOR, summands, own, in_parts=True, stream=TOKEN_COPIES, after=(fused,)
            )
            writer.copy(f"{path}/own", own, buffer, after=(done,))
            return
        done = writer.reduce_scatter(
            path, TENSOR, summands, buffer, in_parts=True, stream=TOKEN_COPIES, after=(fused,)
        )
        if self._stays(summands):  # no free waits for it
            self._awaited.append(done)
        else:
            writer.free(summands, uses=(done,))

    def reduce(
        self,
        value: str,
        buffer: str,
        path: str,
        *,
        read_by: Segment | None = None,
        fused: Edge | None = None,
    ) -> None:
        """Sum `buffer` (`value` or its gradient) over ranks; scatter it if sharded by tokens."""
        suffix = f"/{value}" if read_by is not None else ""
        if self.model.values[value].tensor_sharded:
            into = f"{path}/scatter{suffix}"
            self.scatter(value, buffer, into, read_by=read_by, fused=fused)
        elif fused is not None:
            self._awaited.append(
                sum_overlapped(self.writer, f"{path}/sum{suffix}", buffer, maker=fused)
            )
        else:
            self.writer.all_reduce(f"{path}/sum{suffix}", TENSOR, buffer, stream=self.stream)

    def keep_own(self, segment: Segment, value: str, buffer: str, path: str) -> None:
        """Copy the rank's tokens of a gradient that is whole to `buffer`, allocated here."""
        whole = self.summands(value, buffer, read_by=segment)
        own = self.model.values[value].elements
        self.writer.allocate(buffer)
        view = View(buffer=whole, size=own, axis=TENSOR)
        self.writer.copy(path, view, buffer)
        self.writer.free(whole)

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str:
        """Return the buffer of all tokens of the value that `part` reads, one for each pass."""
        if self._userbuffers is not None:
            name = self._userbuffers.whole(segment, part.action)
            if name is not None:
                return name
        number = self._gathers.get((instance.value, part.segment), 0)
        name = f"{instance.buffer}/{part.action}/whole{number or ''}"
        narrow = instance.value in self._cast_inputs
        return self._all_tokens(instance.value, name, produced=False, narrow=narrow)

    def gradient(self, value: str) -> str:
        """Return the buffer of the gradients of all tokens of `value`."""
        own = self._userbuffers
        if own is not None and (name := own.output(value, gradient=True)) is not None:
            return name
        narrow = value in self._cast_outputs
        return self._all_tokens(value, f"{value}/gradient/whole", produced=False, narrow=narrow)

    def summands(self, value: str, buffer: str, *, read_by: Segment | None = None) -> str:
        """Return the buffer of partial sums of all tokens of `buffer`, which is a `value`.

        With `read_by`, `buffer` is the gradient of an input of that segment.
        """
        if self._userbuffers is not None:
            found = self._userbuffers.output(value)
            if read_by is not None:
                found = self._userbuffers.input_gradient(read_by)
            if found is not None:
                return found
        return self._all_tokens(value, f"{buffer}/summands", produced=True)

    def _all_tokens(self, value: str, name: str, *, produced: bool, narrow: bool = False) -> str:
        own = self.model.values[value]
        elements, rows = self._rows.of_all(own, self.model.tensor)
        dtype = DType.FP8 if narrow else own.dtype
        return self.writer.buffer(
            name, elements, dtype, Kind.WORKSPACE, produced=produced, rows=rows
        )
