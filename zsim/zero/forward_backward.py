"""Forward, recompute and backward of one unit: its segments and the values between them.

With a tensor axis, partial sums of a segment are reduced at its end on the compute stream, because
the next segment needs them at once. Ranks that share a sequence exchange keys and values there,
too. `Checkpoints` handles the memory between forward and backward.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from zsim.model.model import Model, Segment, Value
from zsim.schedule.operation import Action, Edge, Operand, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.checkpoints import Checkpoints, CheckpointStore
from zsim.zero.dropout import Drawn
from zsim.zero.exchange_weaver import ExchangeWeaver
from zsim.zero.names import SIDE, TENSOR
from zsim.zero.sequence import side_streams
from zsim.zero.state import LOSS_SCALE
from zsim.zero.visit_order import Made, SegmentVisit, UnitVisit, ValueInstance
from zsim.zero.workspace_buffer import workspace_buffer, workspace_of

if TYPE_CHECKING:
    from zsim.zero.load_sums import LoadsOfExperts
    from zsim.zero.side_stream import SideStream

Held = Callable[[int, UnitVisit], str]
"""Returns the name of the buffer that holds a bucket's parameters during a visit."""

VisitKey = tuple[int, bool, bool, Role]
"""Key of visits whose parameters, or gradients, have the same views."""


class ForwardBackward:
    """Writes the visits of a micro-batch to `writer`.

    Without `checkpoints`, they stay on the device, one buffer each.

    Class attributes:
        _slot: suffix of this micro-batch's buffers if several micro-batches are alive at once.
    """

    _slot = ""

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        buckets: Buckets,
        held: Held,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.writer = writer
        self.model = model
        self.strategy = strategy
        self.buckets = buckets
        self.held = held
        self.checkpoints = checkpoints or Checkpoints(
            writer, model, strategy, CheckpointStore(writer, model, strategy)
        )
        self.gradient_slot = ""  # suffix of the buffers of parameter gradients
        self.elsewhere = dict[str, View]()  # whole parameters kept outside their bucket
        self.exchanges = ExchangeWeaver(writer, model, strategy)
        self.tokens, self.rows = self.exchanges.tokens, self.exchanges.experts.rows
        self.loads = _loads(writer, model, strategy)
        self._side = _side_stream(writer, model)
        self._gradients, self._drawn = Counter[str](), Drawn()
        self._operands: dict[tuple[int, bool, int, Action], tuple[Operand, ...]] = {}
        self._views: dict[VisitKey, dict[str, View]] = {}
        self._of_parameters: dict[tuple[VisitKey, tuple[str, ...]], list[Operand]] = {}

    @property
    def micro_batch(self) -> int:
        """The current micro-batch, for which counted rows are allocated."""
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, number: int) -> None:
        self._micro_batch = self.writer.micro_batch = number

    def load(self) -> None:
        """Load a micro-batch of data."""
        batch, writer = self.model.batch, self.writer
        name = writer.buffer(batch.name, batch.elements, batch.dtype, Kind.WORKSPACE, produced=True)
        writer.allocate(name)
        made = [(Role.OUTPUT, writer.all(name))]
        writer.compute("load", Action.LOAD, made, micro_batch=self.micro_batch)

    def seed(self) -> None:
        """Set the gradient of the loss with respect to itself: 1, or the loss scale with fp16."""
        self._seed(self.model.loss, "seed")

    def _seed(self, loss: Value, path: str) -> None:
        writer = self.writer
        name = writer.buffer(f"{loss.name}/gradient", loss.elements, loss.dtype, Kind.WORKSPACE)
        writer.allocate(name)
        self._gradients[loss.name] = 1
        scaled = self.strategy.train.precision is Precision.FP16
        writer.fill(path, name, 1.0, scalar=LOSS_SCALE if scaled else None)

    def forward(self, visit: UnitVisit, after: Sequence[Edge]) -> str:
        """Run the forward of the unit; return its last operation that reads parameters."""
        last = ""
        for part in visit.segments:
            again = visit.again or self._segment(visit, part).reruns
            last = self._run(visit, part, after, saves=not again)
            after = ()
        if visit.closes:
            self.checkpoints.put_away(visit, last)
        return last

    def backward(self, visit: UnitVisit, after: Sequence[Edge]) -> str:
        """Run the visit's recomputes and backwards; return the id of its last operation."""
        if visit.opens:
            after = (*after, *self.checkpoints.bring_back(visit))
        last, allocated = "", False
        for part in visit.segments:
            if part.action is Action.RECOMPUTE:
                last = self._run(visit, part, after, saves=True)
            else:
                if not allocated:
                    self._allocate_transients(visit)
                    allocated = True
                last = self._run_backward(visit, part, after)
            after = ()
        return last

    def transient(self, unit: int, position: int) -> str:
        """Return the name of the buffer of the gradients that autograd makes for a unit's run."""
        run = self.buckets.runs[unit][position]
        return self.writer.buffer(
            f"{self.model.units[unit].name}/gradient{position}{self.gradient_slot}",
            run.size,
            self.strategy.train.precision.compute,
            Kind.WORKSPACE,
            produced=True,
            layout=None if run.layout is None else run.layout.name,
        )

    def _allocate_transients(self, visit: UnitVisit) -> None:
        for position, _ in self.buckets.trained_runs(visit.unit):
            self.writer.allocate(self.transient(visit.unit, position))

    def _run(
        self, visit: UnitVisit, part: SegmentVisit, after: Sequence[Edge], *, saves: bool
    ) -> str:
        """Write the forward or recompute of one segment; return its id."""
        return self._beside(visit, part, lambda: self._forward(visit, part, after, saves=saves))

    def _beside(self, visit: UnitVisit, part: SegmentVisit, write: Callable[[], str]) -> str:
        """Write a segment, which may run on a side stream, or wait for it; return its id."""
        if self._side is None:
            return write()
        start, side = self._side.place, self._segment(visit, part).side
        self.tokens.stream = SIDE if side else COMPUTE
        made = write()
        self._side.settle(start, side=side)
        self.tokens.stream = COMPUTE
        return made

    def _forward(
        self, visit: UnitVisit, part: SegmentVisit, after: Sequence[Edge], *, saves: bool
    ) -> str:
        writer, segment = self.writer, self._segment(visit, part)
        path, again = f"{part.action}{part.segment}", part.action is Action.RECOMPUTE
        if self.loads is not None:
            self.loads.sum(segment, part)
        whole = self.exchanges.before_forward(segment, part)
        for instance in part.makes:
            self.tokens.take(self._made(instance))
        if saves and segment.saved_bytes:
            writer.allocate(self._saved(visit, part))
        operands = self._operands_of(visit, part, saves=saves)
        workspace = [own] if (own := workspace_of(operands)) else []
        writer.allocate(*workspace)
        came = self.exchanges.arrive(segment, part)
        which = (self.micro_batch, visit.unit)
        name = writer.compute(
            path,
            part.action,
            operands,
            unit=self.model.units[visit.unit].name,
            segment=part.segment,
            micro_batch=self.micro_batch,
            after=(*after, *came, *self.exchanges.come()),
            kernels=segment.forward_kernels(again=again),
            draw=self._drawn.draw(segment, part, which, writer.path(path)),
            stream=self.tokens.stream,
        )
        self.exchanges.after_forward(segment, part, name)
        writer.free(*whole, *workspace)
        if segment.sums_output(again=again):
            made = [(instance.value, self._value(instance)) for instance in part.makes]
            self.exchanges.end(segment, part, made, name)
        if saves and self.loads is not None:  # `_apply_expert_bias`: if gradients are recorded
            self.loads.count(self.model.units[visit.unit].biases, part)
        self._end(part, name)
        return name

    def _run_backward(self, visit: UnitVisit, part: SegmentVisit, after: Sequence[Edge]) -> str:
        return self._beside(visit, part, lambda: self._backward(visit, part, after))

    def _backward(self, visit: UnitVisit, part: SegmentVisit, after: Sequence[Edge]) -> str:
        writer, segment = self.writer, self._segment(visit, part)
        if segment.loads is not None:
            self._seed(segment.outputs[-1], f"backward{part.segment}/seed")
        whole = self.exchanges.before_backward(segment, part, self._gradients)
        operands = self._operands_of(visit, part, saves=True)
        made = [operand.view.buffer for operand in operands if operand.role is Role.INPUT_GRADIENT]
        workspace = [own] if (own := workspace_of(operands)) else []
        self.tokens.take(*made, *workspace)
        came = self.exchanges.arrive(segment, part)
        done = writer.compute(
            f"backward{part.segment}",
            Action.BACKWARD,
            operands,
            unit=self.model.units[visit.unit].name,
            segment=part.segment,
            micro_batch=self.micro_batch,
            after=(*after, *came, *self.exchanges.come()),
            kernels=segment.backward,
            stream=self.tokens.stream,
        )
        self.exchanges.after_backward(segment, part, done)
        writer.free(*whole, *workspace)
        if segment.saved_bytes:
            writer.free(self._saved(visit, part))
        for value in segment.outputs:
            if value.name in self._gradients:
                del self._gradients[value.name]
                self._free_gradient(value)
        self._end(part, done)
        for name in self._differentiable(segment):
            self._settle_gradient(name, part, segment)
        return done

    def _free_gradient(self, value: Value) -> None:
        """Free the gradient of a value that no other backward reads."""
        self.writer.free(f"{value.name}/gradient")

    def _settle_gradient(self, value: str, part: SegmentVisit, segment: Segment) -> None:
        """Reduce a gradient over its ranks, and add it to the contributions of other readers."""
        name = self._contribution(value)
        contributes = self.exchanges.contributes(segment, value)
        if contributes:
            self._gradients[value] += 1
        self.exchanges.settle(segment, part, value, name)
        if not contributes or self._gradients[value] == 1:
            return
        total, came = f"{value}/gradient", self.exchanges.come()
        self.writer.copy(
            f"backward{part.segment}/add/{value}",
            name,
            total,
            accumulate=True,
            after=came,
            stream=self.tokens.stream,
        )
        self.writer.free(name)

    def _contribution(self, value: str) -> str:
        """Return the buffer for the next contribution to a gradient; the first becomes the sum."""
        number = self._gradients[value]
        return f"{value}/gradient" + ("/other" if number else "") + (str(number) * (number > 1))

    def _operands_of(
        self, visit: UnitVisit, part: SegmentVisit, *, saves: bool
    ) -> tuple[Operand, ...]:
        """Return the operands of a segment, cached because every micro-batch has the same."""
        key = (visit.unit, visit.backward, part.segment, part.action)
        if (found := self._operands.get(key)) is not None:
            return found
        segment = self._segment(visit, part)
        read = [self._read(part, each, segment) for each in part.reads]
        operands = [Operand(role=Role.INPUT, view=view) for view in read]
        operands += self._parameters(visit, segment, Role.PARAMETER)
        if saves and segment.saved_bytes:
            view = self.writer.all(self._saved(visit, part))
            operands.append(Operand(role=Role.SAVED, view=view))
        if part.action is Action.BACKWARD:
            operands += self._gradient_operands(segment)
            operands += self._parameters(visit, segment, Role.GRADIENT)
        else:
            partial = (TENSOR,) if segment.sums else ()
            made = [self.writer.all(self._made(instance)) for instance in part.makes]
            operands += [Operand(role=Role.OUTPUT, view=view, partial=partial) for view in made]
            operands += self.tokens.parts_made(segment, part)
        if own := self._workspace(visit, part, operands):
            operands.append(Operand(role=Role.WORKSPACE, view=self.writer.all(own)))
        self._operands[key] = tuple(operands)
        return self._operands[key]

    def _gradient_operands(self, segment: Segment) -> list[Operand]:
        """Return the gradients that a backward reads and writes."""
        operands = [
            Operand(role=Role.OUTPUT_GRADIENT, view=self.writer.all(self._gradient(value)))
            for value in segment.outputs
            if value.name in self._gradients
        ]
        for name in self._differentiable(segment):
            buffer = self._made_gradient(segment, self.model.values[name])
            partial = self.exchanges.partial(segment, name)
            view = self.writer.all(buffer)
            operands.append(Operand(role=Role.INPUT_GRADIENT, view=view, partial=partial))
        return operands

    def _made_gradient(self, segment: Segment, value: Value) -> str:
        """Return the buffer to which a backward writes the gradient of an input."""
        own, axis = self._contribution(value.name), self.exchanges.changing(segment, value.name)
        if self.exchanges.contributes(segment, value.name):
            elements, rows = self.rows.of_value(value)
            own = self.writer.buffer(
                own, elements, value.dtype, Kind.WORKSPACE, produced=axis is None, rows=rows
            )
        return own if axis is None else axis.made_by_backward(segment, value.name, own)

    def _differentiable(self, segment: Segment) -> list[str]:
        return [name for name in segment.inputs if self.model.values[name].requires_gradient]

    def _parameters(self, visit: UnitVisit, segment: Segment, role: Role) -> list[Operand]:
        """Return operands for the segment's parameters, or their gradients, in the unit's order."""
        key = (visit.unit, visit.backward, visit.only_recomputes, role)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._parameter_views(visit, role)
        names = tuple(segment.parameters)
        if role is Role.GRADIENT:
            names = tuple(self.model.trained_of(segment))
        found = self._of_parameters.get((key, names))
        if found is None:
            found = self._of_parameters[key, names] = [
                Operand(role=role, view=views[name], partial=self._partial(role, name))
                for name in names
            ]
        return found

    def _parameter_views(self, visit: UnitVisit, role: Role) -> dict[str, View]:
        """Return the views of the unit's parameters, or of their gradients, by name."""
        views = {
            each.name: View(buffer=each.name, size=each.elements)
            for each in self.model.units[visit.unit].biases
        }
        elsewhere = self.elsewhere if role is Role.PARAMETER else {}
        for position, run in enumerate(self.buckets.runs[visit.unit]):
            members, starts = run.parameters, run.starts
            if role is Role.PARAMETER:
                buffer = self.held(run.bucket, visit)
            elif members := run.trained:
                buffer = self.transient(visit.unit, position)
                starts = (0, *accumulate(parameter.elements for parameter in members))
            else:
                continue
            for parameter, start in zip(members, starts, strict=False):
                view = View(buffer=buffer, start=start, size=parameter.elements)
                views[parameter.name] = elsewhere.get(parameter.name, view)
        return views

    def _partial(self, role: Role, name: str) -> tuple[str, ...]:
        """Return the axes over which a gradient is partial: tensor ranks see different tokens."""
        return (TENSOR,) if role is Role.GRADIENT and name in self.tokens.shared else ()

    def _segment(self, visit: UnitVisit, part: SegmentVisit) -> Segment:
        return self.model.units[visit.unit].segments[part.segment]

    def _value(self, instance: ValueInstance) -> str:
        value = self.model.values[instance.value]
        elements, rows = self.rows.of_value(value)
        return self.writer.buffer(
            instance.buffer,
            elements,
            value.dtype,
            Kind.WORKSPACE,
            produced=instance.value not in self.tokens.scattered | self.rows.swapped,
            rows=rows,
        )

    def _workspace(self, visit: UnitVisit, part: SegmentVisit, operands: Sequence[Operand]) -> str:
        """Return the buffer a segment needs only while it runs; an empty string if none."""
        saved = self._saved(visit, part) if self._segment(visit, part).saved_bytes else ""
        return workspace_buffer(
            self.writer, self.model, visit, part, saved=saved, operands=operands, rows=self.rows
        )

    def _saved(self, visit: UnitVisit, part: SegmentVisit) -> str:
        segment = self._segment(visit, part)
        dtype, unit = self.strategy.train.precision.compute, self.model.units[visit.unit].name
        size = -(-segment.saved_bytes // dtype.size_bytes)
        elements, rows = self.rows.of_segment(unit, part.segment, size)
        return self.writer.buffer(
            f"{unit}/saved{part.segment}{self._slot}",
            elements,
            dtype,
            Kind.SAVED,
            produced=True,
            rows=rows,
        )

    def _view(self, instance: ValueInstance) -> View:
        if instance.made is Made.GATHERED:
            return self.checkpoints.view(instance.value)
        return self.writer.all(instance.buffer)

    def _end(self, part: SegmentVisit, last: str) -> None:
        """Free the values that no operation reads after `last`."""
        for instance in part.ends:
            if instance.made is Made.GATHERED:
                self.checkpoints.end(instance.value, last)
                continue
            is_summed = instance.buffer in self.writer.alive
            self.tokens.give(instance.buffer if is_summed else self._made(instance))

    def _read(self, part: SegmentVisit, instance: ValueInstance, segment: Segment) -> View:
        if instance.is_kept_for(part.action):
            self.writer.count_as_saved(self._view(instance).buffer)
        exchanged = self.exchanges.read(segment, part, instance)
        return self._view(instance) if exchanged is None else self.writer.all(exchanged)

    def _made(self, instance: ValueInstance) -> str:
        value = self._value(instance)
        if instance.value in self.rows.swapped:
            return self.exchanges.experts.sent(instance.value, value)
        is_cut = instance.value in self.tokens.scattered
        return self.tokens.summands(instance.value, value) if is_cut else value

    def _gradient(self, value: Value) -> str:
        if value.name in self.rows.swapped:
            return self.exchanges.experts.gradient(value.name)
        is_cut = value.name in self.tokens.scattered
        return self.tokens.gradient(value.name) if is_cut else f"{value.name}/gradient"


def _side_stream(writer: ScheduleWriter, model: Model) -> "SideStream | None":
    """Return the writer of waits for a side stream; None if no segment runs on one."""
    if not side_streams(model):
        return None
    from zsim.zero.side_stream import SideStream  # noqa: PLC0415 (rare)

    return SideStream(writer)


def _loads(writer: ScheduleWriter, model: Model, strategy: Strategy) -> "LoadsOfExperts | None":
    """Return the writer of sums of loads of experts; None if no segment makes any."""
    segments = (segment for unit in model.units for segment in unit.segments)
    if not (model.biases or any(each.loads is not None for each in segments)):
        return None
    from zsim.zero.load_sums import LoadsOfExperts  # noqa: PLC0415 (most models have no experts)

    return LoadsOfExperts(writer, strategy)
