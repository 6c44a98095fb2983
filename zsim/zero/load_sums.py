"""Sums of the loads of experts for auxiliary losses and for biases, over the ranks of their scope.

For a loss, ranks sum the loads in place on the compute stream, before the segment of the loss. A
global loss reads the sum of this micro-batch and all earlier ones, which is kept until the end of
the last forward (`_apply_global_aux_loss` of megatron/core/transformer/moe/router.py).

For biases, each rank adds up its loads of all micro-batches. Once a step, the loads of all layers
are put into one tensor, which all ranks sum (`_update_router_expert_bias` of
megatron/core/distributed/finalize_model_grads.py). Then each bias is updated, even if gradients
overflow, and the loads are set to zero.
"""

from collections.abc import Iterable

from zsim.closed_form.exchanged_tokens import LoadGroup, load_group
from zsim.dtype import DType
from zsim.model.experts import LoadScope
from zsim.model.kernel import KernelKind, streaming
from zsim.model.model import Model, Parameter, Segment
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Group
from zsim.schedule.operation import Action, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import bias_rule, inside, mesh_of
from zsim.zero.names import CONTEXT, TENSOR, WORLD
from zsim.zero.state import persist_zeros
from zsim.zero.visit_order import SegmentVisit


def declared(writer: ScheduleWriter, strategy: Strategy, found: LoadGroup) -> str:
    """Return the name of a group of ranks that sum loads; declare it if no axis has it."""
    if found.name not in {TENSOR, CONTEXT, WORLD}:
        group = Group(name=found.name, axes=inside(mesh_of(strategy), found.axes))
        if group not in writer.groups:
            writer.groups.append(group)
    return found.name


class LoadsOfExperts:
    """Writes the sums of loads to `writer`."""

    def __init__(self, writer: ScheduleWriter, strategy: Strategy) -> None:
        self.writer = writer
        self.strategy = strategy

    def sum(self, segment: Segment, part: SegmentVisit) -> None:
        """Sum the load that a segment reads, if it is an auxiliary loss of several tokens."""
        if segment.loads is None:
            return
        buffer = part.reads[-1].buffer
        group = load_group(self.strategy, segment.loads)
        path = f"{part.action}{part.segment}/load"
        if group is not None:
            name = declared(self.writer, self.strategy, group)
            self.writer.all_reduce(f"{path}/sum", name, buffer, stream=COMPUTE)
        if segment.loads is LoadScope.BATCH:
            self._add_earlier(path, buffer, segment.inputs[-1])

    def count(self, biases: Iterable[Parameter], part: SegmentVisit) -> None:
        """Add the loads that a segment has made to the sums of the biases that follow them."""
        made = {instance.value: instance.buffer for instance in part.makes}
        for bias in biases:
            if bias.load in made:
                path = f"{part.action}{part.segment}/load/{bias.name}"
                self.writer.copy(path, made[bias.load], load_buffer(bias), accumulate=True)

    def _add_earlier(self, path: str, buffer: str, value: str) -> None:
        """Add the load of all earlier micro-batches to that of this one."""
        writer, own = self.writer, self.writer.buffers[buffer]
        name, _, _ = value.partition("@")  # slots of micro-batches share the sum
        so_far = writer.buffer(f"{name}/so_far", own.elements, own.dtype, Kind.WORKSPACE)
        number, count = writer.micro_batch, self.strategy.train.gradient_accumulation_steps
        if not number:
            writer.allocate(so_far)
        writer.copy(f"{path}/count", buffer, so_far, accumulate=number > 0)
        if number:
            writer.copy(f"{path}/so_far", so_far, buffer)
        if number == count - 1:
            writer.free(so_far)


KERNELS_OF_UPDATE = 4
"""Kernels of the update of all biases: mean, difference, its sign, and the sum."""


class BiasesOfExperts:
    """Writes setup and update of the biases of experts of `model` to `writer`."""

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        self.writer = writer
        self.strategy = strategy
        self.biases = model.biases
        self.rule = bias_rule(model)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each bias: alone, with copies on all ranks."""
        copies = (TENSOR,) if self.strategy.parallel.tensor > 1 else ()
        return tuple(
            Layout(
                name=each.name,
                pieces=(Piece(parameter=each.name, start=0, size=each.elements, copies=copies),),
                elements=each.elements,
            )
            for each in self.biases
        )

    def write_setup(self) -> None:
        """Initialize each bias, and set its load to zero."""
        writer = self.writer
        for each in self.biases:
            writer.prefix = f"setup/{each.name}"
            name = writer.buffer(
                each.name, each.elements, DType.FP32, Kind.PARAMETER, layout=each.name
            )
            writer.persist(name)
            operands = [(Role.PARAMETER, writer.all(name))]
            writer.compute("initialize/parameter", Action.INITIALIZE, operands, stream=COMPUTE)
            load = writer.buffer(load_buffer(each), each.elements, DType.FP32, Kind.WORKSPACE)
            persist_zeros(writer, load, "load")

    def update(self) -> None:
        """Sum the loads of all layers over all ranks of the stage, and update the biases."""
        writer, biases = self.writer, self.biases
        if not biases:
            return
        writer.prefix = "step/balance"
        ends = 0
        views: list[View] = []
        size = sum(each.elements for each in biases)
        every = writer.buffer("router_loads", size, DType.FP32, Kind.WORKSPACE)
        writer.allocate(every)
        for number, each in enumerate(biases):  # `torch.stack`: one kernel
            views.append(View(buffer=every, start=ends, size=each.elements))
            ends += each.elements
            load = load_buffer(each)
            writer.copy(f"stack/{each.name}", load, views[-1], launches=int(not number))
        group = load_group(self.strategy, LoadScope.BATCH)
        if group is not None:
            name = declared(writer, self.strategy, group)
            writer.all_reduce("sum", name, every, stream=COMPUTE)
        for number, (each, view) in enumerate(zip(biases, views, strict=True)):
            kernel = streaming(KernelKind.ELEMENTWISE, (size,), DType.FP32, streams=2)
            writer.compute(
                f"{each.name}/update",
                Action.UPDATE,
                [(Role.PARAMETER, writer.all(each.name)), (Role.GRADIENT, view)],
                rule=self.rule,
                kernels=() if number else (kernel,) * KERNELS_OF_UPDATE,
            )
            writer.fill(f"{each.name}/zero", load_buffer(each), 0.0)
        writer.free(every)


def load_buffer(bias: Parameter) -> str:
    """Return the buffer in which a rank adds up the load of a bias in a step."""
    return f"{bias.name}/load"
