"""One step of plain training: the reference result of every schedule of a model and an optimizer.

Forward and backward of every micro-batch on every replica, the mean of all gradients, clipping by
their norm, the optimizer. Frozen parameters are read and stay constant; no gradient is propagated
past the first trained segment. Auxiliary losses are added to the loss. A bias of experts is updated
from the rows of each expert, summed over all ranks and micro-batches, also after a step that
overflows (`finalize_model_grads` of Megatron-LM). Ranks of the tensor axis run in parallel, as the
model defines.

Arrays have the lanes first, then one dimension for each axis of the mesh, then pieces. A dimension
of size 1 holds values that are equal along that axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import assert_never

import numpy as np

from zsim.model.experts import LoadScope
from zsim.model.model import Model, Segment, Unit
from zsim.model.segment_exchange import ExchangeAxis, ExchangeKind, SegmentExchange
from zsim.specification.residues import Numbers, Random, product, share, summed, total, weighted
from zsim.specification.row_kernels import RowKernel
from zsim.specification.row_kinds import RowKinds, drop_rules
from zsim.specification.stand_ins import clipping, digest, updated
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer


@dataclass(frozen=True, kw_only=True)
class TensorCuts:
    """The number of pieces of each tensor, and the axes along which ranks differ.

    Attributes:
        shape: coordinates along each axis of the mesh.
        weights: for each axis, the number of ranks that a coordinate represents.
        data: dimensions along which ranks see different data, lanes counted.
        tensor: the dimension of the tensor axis, lanes counted; None if there is none.
        context: that of the ranks that share a sequence; None if no ranks do.
        parameters: elements in each piece of a parameter.
        values: pieces of a value on one rank; `whole` on all ranks of the tensor axis together,
            `shared` on all ranks that share a sequence together.
        copied: parameters of which ranks of the tensor axis hold copies.
        experts: parameters that differ along the dimensions `expert`, instead of the tensor axis.
        expert: these dimensions, lanes counted; experts are equal along all other dimensions.
        swap: dimensions of the ranks that exchange tokens of experts, the slowest first.
        joins: dimensions of the ranks that gather tokens of experts, the slowest first.
        joined: pieces of a value on all of these ranks together.
        kinds: kinds of rows of one source for one expert, by the rules that drop rows.
    """

    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    data: tuple[int, ...]
    tensor: int | None
    parameters: Mapping[str, Sequence[int]]
    values: Mapping[str, int]
    whole: Mapping[str, int]
    copied: frozenset[str]
    context: int | None = None
    shared: Mapping[str, int] = field(default_factory=dict[str, int])
    experts: frozenset[str] = frozenset()
    expert: tuple[int, ...] = ()
    swap: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()
    joined: Mapping[str, int] = field(default_factory=dict[str, int])
    kinds: RowKinds = field(default_factory=RowKinds)

    @property
    def dimensions(self) -> int:
        """The number of dimensions of an array."""
        return len(self.shape) + 2

    def held(self, parameter: str) -> tuple[int, ...]:
        """Return the dimensions along which ranks hold different parts of a parameter."""
        if parameter in self.experts:
            return self.expert
        return () if self.tensor is None or parameter in self.copied else (self.tensor,)

    def alike(self, parameter: str) -> tuple[int, ...]:
        """Return the dimensions along which gradients of a parameter are of different tokens.

        Tensor ranks have different tokens if experts are distributed over them.
        """
        if parameter not in self.experts:
            return self.data
        every = self.data if self.tensor is None else (*self.data, self.tensor)
        return tuple(place for place in every if place not in self.expert)

    def along(self, dimensions: Sequence[int]) -> tuple[int, ...]:
        """Return a shape that is full along some dimensions, and 1 along the others."""
        return tuple(
            size if place + 1 in dimensions else 1 for place, size in enumerate(self.shape)
        )

    def summed(self, numbers: Numbers, dimensions: Sequence[int]) -> Numbers:
        """Add up over all ranks along some dimensions, also if the values are equal along them."""
        for place in dimensions:
            numbers = weighted(numbers, place, self.weights[place - 1])
        return numbers


NOTHING: Numbers = np.zeros((2, 0), np.uint64)
NOTHING.flags.writeable = False


@dataclass(slots=True)
class Application:
    """A run of a segment on one micro-batch: its inputs and the results of its function.

    Attributes:
        inputs, parameters: read by forward; `kept` are the inputs that backward reads again.
        outputs, saved: made by forward.
        towards: factors of the gradient of the outputs in the gradients of trained parameters, then
            of inputs, concatenated; `ends` is the end of each.
        slopes: the gradients of the outputs; `slope` is their combination, and `made` the results
            of
            backward: gradients of `trained` parameters, then of inputs.
    """

    inputs: list[Numbers]
    parameters: list[Numbers]
    outputs: list[Numbers]
    saved: Numbers | None
    kept: Sequence[Numbers] = ()
    towards: Numbers = field(default_factory=lambda: NOTHING)
    ends: Sequence[int] = ()
    slopes: Sequence[Numbers] = ()
    slope: Numbers | None = None
    trained: int = 0
    made: Sequence[Numbers] = ()

    def parts(self, whole: Numbers) -> list[Numbers]:
        """Split `whole` into the gradients that are concatenated in it."""
        return [whole[..., low:high] for low, high in zip([0, *self.ends], self.ends, strict=False)]


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """State of training between steps: parameters, moments, and the number of updates."""

    parameters: dict[str, Numbers]
    moments: tuple[dict[str, Numbers], ...]
    updates: float


def spread(*operands: Numbers) -> tuple[int, ...]:
    """Return the shape along the axes to which all operands broadcast."""
    shapes = {each.shape[1:-1] for each in operands}
    return shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)


def losses(model: Model) -> tuple[str, ...]:
    """Return the values that training minimizes: auxiliary losses, then the loss."""
    auxiliary = (
        segment.outputs[-1].name
        for unit in model.units
        for segment in unit.segments
        if segment.loads is not None
    )
    return *auxiliary, model.loss.name


class PlainStep:
    """The step from one state, with inputs and results of every kernel in it."""

    def __init__(
        self, model: Model, cut: TensorCuts, random: Random, *, micro_batches: int
    ) -> None:
        self.model = model
        self.cut = cut
        self.random = random
        self.micro_batches = micro_batches
        self.applications: dict[tuple[str, int, int], Application] = {}
        self.batches = [
            random.draw((*cut.along(cut.data), cut.values[model.batch.name]))
            for _ in range(micro_batches)
        ]
        self._alike: dict[str, Numbers] = {}
        self._saved_rows: dict[tuple[str, int, int], tuple[list[Numbers], list[Numbers]]] = {}
        self._parameters: dict[str, Numbers] = {}
        self._drops = drop_rules(model) if cut.kinds.count > 1 else {}
        self._so_far: dict[tuple[str, int], Numbers] = {}
        self.loads: dict[str, Numbers] = {}

    def state(self, moments: int, updates: float) -> TrainingState:
        """Draw an arbitrary state of training."""
        drawn = [
            {
                name: self.random.draw((*self.cut.along(self.cut.held(name)), len(sizes)))
                for name, sizes in self.cut.parameters.items()
            }
            for _ in range(1 + moments)
        ]
        return TrainingState(parameters=drawn[0], moments=tuple(drawn[1:]), updates=updates)

    def gradients(self, parameters: dict[str, Numbers], divisor: int) -> dict[str, Numbers]:
        """Run every micro-batch; return the sum of gradients over all replicas / `divisor`."""
        cut, found = self.cut, dict[str, Numbers]()
        self._parameters = parameters
        self._so_far.clear()
        self.loads.clear()
        sums: dict[tuple[str, int], Numbers] = {}
        for micro_batch in range(self.micro_batches):
            for key, made in self._micro_batch(micro_batch).items():
                sums[key] = total(sums[key], made) if key in sums else made
        for unit in self.model.units:
            for place, segment in enumerate(unit.segments):
                end = 0
                for name in self.model.trained_of(segment) if (unit.name, place) in sums else ():
                    start, end = end, end + len(cut.parameters[name])
                    gradient = sums[unit.name, place][..., start:end]
                    found[name] = total(found[name], gradient) if name in found else gradient
        partial = self.model.summed_copies
        for name, gradient in found.items():
            over = list(cut.alike(name))
            if name in partial and cut.tensor is not None:
                over.append(cut.tensor)  # each rank has that of its own tokens or heads only
            whole = cut.summed(gradient, over)
            found[name] = product(whole, share(divisor, whole.ndim))
        return found

    def clipped(self, gradients: dict[str, Numbers], clip: ClipNorm | None) -> dict[str, Numbers]:
        """Return the gradients after clipping, the optimizer's input."""
        if clip is None:
            return gradients
        factor = clipping(self.random, clip, self._squares(gradients), 1.0)
        return {name: product(each, factor) for name, each in gradients.items()}

    def balanced(self, state: TrainingState, rules: Mapping[str, Optimizer]) -> TrainingState:
        """Return the state after the biases of experts are updated from the loads of a step."""
        moved = {
            name: updated(self.random, rules[name], [load, state.parameters[name]], None)[0]
            for name, load in self.loads.items()
        }
        return replace(state, parameters=state.parameters | moved)

    def updated(
        self, state: TrainingState, gradients: dict[str, Numbers], rules: Mapping[str, Optimizer]
    ) -> TrainingState:
        """Return the state after each parameter's rule; moments that a rule ignores are kept."""
        parameters: dict[str, Numbers] = {}
        moments: list[dict[str, Numbers]] = [{} for _ in state.moments]
        for name, trained in state.parameters.items():
            held = [each[name] for each in state.moments]
            if name in self.model.frozen:
                parameters[name] = trained
                for moment, value in zip(moments, held, strict=True):
                    moment[name] = value
                continue
            rule = rules[name]
            step = state.updates + 1 if rule.counts_steps else None
            gradient = gradients.get(name, np.zeros_like(trained))
            made = updated(self.random, rule, [gradient, trained, *held[: rule.moments]], step)
            parameters[name] = made[0]
            for moment, value in zip(moments, [*made[1:], *held[rule.moments :]], strict=True):
                moment[name] = value
        return TrainingState(
            parameters=parameters, moments=tuple(moments), updates=state.updates + 1
        )

    def _squares(self, gradients: dict[str, Numbers]) -> Numbers:
        """Return the sum of squares of all elements, each counted once, shape (2, ..., 1)."""
        cut = self.cut
        found = np.zeros((2, *(1,) * (cut.dimensions - 1)), np.uint64)
        for name, gradient in gradients.items():
            sizes = np.array(cut.parameters[name], np.uint64)
            squares = summed(product(product(gradient, gradient), sizes), -1, keepdims=True)
            if held := cut.held(name):
                squares = cut.summed(squares, held)
            elif cut.tensor is not None and squares.shape[cut.tensor] > 1:
                squares = squares[(slice(None),) * cut.tensor + (slice(0, 1),)]
            found = total(found, squares)
        return found

    def _micro_batch(self, micro_batch: int) -> dict[tuple[str, int], Numbers]:
        """Run forward and backward through all units.

        Returns the gradients of the trained parameters of each segment, concatenated.
        """
        values = {self.model.batch.name: self.batches[micro_batch]}
        for unit in self.model.units:
            for place in range(len(unit.segments)):
                self._forward(values, unit, place, micro_batch=micro_batch)
        for name, load in self.model.loads.items():
            whole = self._summed(values[load], load, LoadScope.MICRO_BATCH)
            self.loads[name] = total(self.loads[name], whole) if name in self.loads else whole
        one = np.ones((2, *(1,) * (self.cut.dimensions - 1)), np.uint64)
        slopes = dict.fromkeys(losses(self.model), one)
        gradients: dict[tuple[str, int], Numbers] = {}
        for unit in reversed(self.model.units):
            for place in reversed(range(len(unit.segments))):
                if self.model.runs_backward(unit.segments[place]):
                    made = self._backward(slopes, unit, place, micro_batch=micro_batch)
                    gradients[unit.name, place] = made
        return gradients

    def _is_cut(self, name: str) -> bool:
        return self.model.values[name].tensor_sharded and self.cut.tensor is not None

    def _together(self, numbers: Numbers, places: Sequence[int]) -> Numbers:
        """Return the concatenated values of all ranks along dimensions, the slowest first."""
        shape = list(numbers.shape)
        for place in places:
            shape[place] = self.cut.shape[place - 1]
        ends = range(-1 - len(places), -1)
        moved = np.moveaxis(np.broadcast_to(numbers, shape), places, ends)
        joined = moved.reshape(*moved.shape[: -1 - len(places)], -1)
        return np.expand_dims(joined, tuple(places))

    def _own(self, numbers: Numbers, places: Sequence[int]) -> Numbers:
        """Return each rank's own part of the concatenated values of all ranks along dimensions."""
        ranks = [self.cut.shape[place - 1] for place in places]
        parts = numbers.squeeze(tuple(places))
        parts = parts.reshape(*parts.shape[:-1], *ranks, -1)
        return np.moveaxis(parts, range(-1 - len(places), -1), places)

    def _sum(self, numbers: Numbers, name: str) -> Numbers:
        """Add up over the tensor axis; of a sharded value each rank keeps its own part."""
        if self.cut.tensor is None:
            return numbers
        whole = self.cut.summed(numbers, (self.cut.tensor,))
        return self._own(whole, (self.cut.tensor,)) if self._is_cut(name) else whole

    def _read(self, values: Mapping[str, Numbers], unit: Unit, place: int) -> list[Numbers]:
        segment = unit.segments[place]
        read = [self._received(values[name], segment, name) for name in segment.inputs]
        if segment.loads is None:
            return read
        load = self._summed(read[-1], segment.inputs[-1], segment.loads)
        if segment.loads is LoadScope.BATCH:
            known = self._so_far.get((unit.name, place))
            load = self._so_far[unit.name, place] = load if known is None else total(known, load)
        return [*read[:-1], load]

    def _summed(self, load: Numbers, name: str, scope: LoadScope) -> Numbers:
        """Return the sum of the loads of experts in a micro-batch, over the ranks of a scope."""
        cut = self.cut
        tokens = cut.tensor in cut.data or self.model.values[name].tensor_sharded
        sequence = {cut.context, cut.tensor if tokens else None}  # else tensor ranks have copies
        if scope is LoadScope.RANK:
            return load
        over = sequence if scope is LoadScope.SEQUENCE else sequence.union(cut.data)
        return cut.summed(load, sorted(each for each in over if each is not None))

    def _kept(self, numbers: Numbers, value: str) -> Numbers:
        """Return a value, with zeros for the rows that its rule drops."""
        rule = self._drops.get(value)
        if rule is None:
            return numbers
        return product(numbers, self.cut.kinds.kept(rule, numbers.shape[-1]))

    def _received(self, own: Numbers, segment: Segment, name: str) -> Numbers:
        """Return the values of an input after the exchange that begins a segment."""
        exchange = segment.exchange_of(name)
        if exchange is None:
            return own
        match exchange.kind:
            case ExchangeKind.GATHER:
                places = self._places_of(exchange, name)
                return self._together(own, places) if places else own
            case ExchangeKind.PASS:
                return self._passed(own, exchange.offset)
            case ExchangeKind.SUM | ExchangeKind.OWN | ExchangeKind.SWAP:
                raise AssertionError(exchange)
            case _:
                assert_never(exchange.kind)

    def _returned(self, gradient: Numbers, segment: Segment, name: str) -> Numbers:
        """Return the gradient of an input after the adjoint of that exchange."""
        exchange = segment.exchange_of(name)
        if exchange is None:
            return gradient
        places = self._places_of(exchange, name)
        match exchange.adjoint:
            case ExchangeKind.SUM if exchange.axis is ExchangeAxis.TENSOR:
                return self._sum(gradient, name)
            case ExchangeKind.SUM:
                return self._own(self.cut.summed(gradient, places), places) if places else gradient
            case ExchangeKind.OWN:
                return self._own(gradient, places) if places else gradient
            case ExchangeKind.PASS:  # back to the rank that sent the input
                return self._passed(gradient, -exchange.offset)
            case ExchangeKind.GATHER | ExchangeKind.SWAP:
                raise AssertionError(exchange)
            case _:
                assert_never(exchange.adjoint)

    def _places_of(self, exchange: SegmentExchange, name: str) -> tuple[int, ...]:
        """Return the dimensions of the ranks that hold parts of a value; empty if all hold it."""
        place: int | None
        match exchange.axis:
            case ExchangeAxis.TENSOR:
                place = self.cut.tensor if self._is_cut(name) else None
            case ExchangeAxis.CONTEXT:
                place = self.cut.context
            case ExchangeAxis.EXPERT:
                return self.cut.joins
            case _:
                assert_never(exchange.axis)
        return () if place is None else (place,)

    def _passed(self, numbers: Numbers, offset: int) -> Numbers:
        """Return the values of the rank `offset` places before on the context axis."""
        place = self.cut.context
        if place is None or numbers.shape[place] == 1:
            return numbers
        return np.roll(numbers, offset, place)

    def _swapped(self, numbers: Numbers) -> Numbers:
        """Return for each expert rank the blocks with its number, in the order of their ranks."""
        places = self.cut.swap
        sizes = [self.cut.shape[place - 1] for place in places]
        ranks = prod(sizes)
        if ranks == 1:
            return numbers
        shape = list(numbers.shape)
        for place, size in zip(places, sizes, strict=True):
            shape[place] = size
        moved = np.moveaxis(np.broadcast_to(numbers, shape), places, range(-1 - len(places), -1))
        blocks = moved.reshape(*moved.shape[: -1 - len(places)], ranks, ranks, -1)
        own = blocks.swapaxes(-3, -2).reshape(moved.shape)
        return np.moveaxis(own, range(-1 - len(places), -1), places)

    def _is_shared(self, segment: Segment, name: str) -> bool:
        """Return True if a segment reads an input of all ranks that share a sequence."""
        return self.cut.context is not None and name == segment.shared_input

    def _pieces(self, name: str, *, whole: bool, joined: bool) -> int:
        if joined:
            return self.cut.joined[name]
        return self.cut.whole[name] if whole and self._is_cut(name) else self.cut.values[name]

    def _forward(
        self, values: dict[str, Numbers], unit: Unit, place: int, *, micro_batch: int
    ) -> None:
        segment = unit.segments[place]
        inputs = self._read(values, unit, place)
        parameters = [self._parameters[name] for name in segment.parameters]
        if segment.experts:
            kernel = self._rows(unit, place, segment.experts)
            count = len(segment.outputs) + bool(segment.saved_bytes)
            made_rows = kernel.forward(inputs, parameters, count)
            first = segment.inputs[0]  # all rows of a segment have one rule
            made_rows = [self._kept(each, first) for each in made_rows]
            self._saved_rows[unit.name, place, micro_batch] = inputs, made_rows
            for value, output in zip(segment.outputs, made_rows, strict=False):
                values[value.name] = output
            return
        shape, whole, joined = spread(*inputs, *parameters), segment.sums, segment.adds_all
        outputs = [
            self.random.draw((*shape, self._pieces(value.name, whole=whole, joined=joined)))
            for value in segment.outputs
        ]
        saved = self.random.draw((*shape, 1)) if segment.saved_bytes else None
        made = Application(inputs, parameters, outputs, saved)
        self.applications[unit.name, place, micro_batch] = made
        for value, output in zip(segment.outputs, outputs, strict=True):
            values[value.name] = self._kept(
                self._after_end(output, segment, value.name), value.name
            )

    def wanted(self, segment: Segment) -> list[str]:
        """Return the inputs of a segment that have a gradient."""
        values = self.model.values
        return [name for name in segment.inputs if values[name].requires_gradient]

    def _backward(
        self,
        slopes: dict[str, Numbers],
        unit: Unit,
        place: int,
        *,
        micro_batch: int,
    ) -> Numbers:
        """Return the gradients of the segment's trained parameters, concatenated."""
        segment = unit.segments[place]
        if segment.experts:
            return self._backward_of_rows(slopes, unit, place, micro_batch=micro_batch)
        made = self.applications[unit.name, place, micro_batch]
        name = f"{unit.name}/{place}"
        made.kept = made.inputs[segment.adds :] if segment.saves_input else []
        wanted = self.wanted(segment)
        made.towards, made.ends = self._towards(name, made, segment, wanted)
        made.slopes = [
            self._before_end(slopes[value.name], segment, value.name)
            for value in segment.outputs
            if value.name in slopes
        ]
        slope = made.slope = self.slope(name, made.slopes)
        whole = product(made.towards, slope)
        parts = made.made = made.parts(whole)
        trained = made.trained = len(self.model.trained_of(segment))
        for value, towards in zip(wanted, parts[trained:], strict=True):
            gradient = self._kept(self._returned(towards, segment, value), value)
            known = slopes.get(value)
            slopes[value] = gradient if known is None else total(known, gradient)
        return whole[..., : made.ends[trained - 1] if trained else 0]

    def _after_end(self, output: Numbers, segment: Segment, value: str) -> Numbers:
        """Return an output after the exchange that ends a segment."""
        if segment.exchanges_rows(self.model.values[value]):
            return self._swapped(output)
        if segment.adds_all:
            return self._own(self.cut.summed(output, self.cut.joins), self.cut.joins)
        return self._sum(output, value) if segment.sums else output

    def _before_end(self, slope: Numbers, segment: Segment, value: str) -> Numbers:
        """Return the gradient of an output before the exchange that ends a segment."""
        if segment.exchanges_rows(self.model.values[value]):
            return self._swapped(slope)
        if segment.adds_all:
            return self._together(slope, self.cut.joins)
        if segment.sums and self._is_cut(value) and self.cut.tensor is not None:
            return self._together(slope, (self.cut.tensor,))
        return slope

    def _rows(self, unit: Unit, place: int, experts: int) -> RowKernel:
        """Return the kernels of a segment whose replica has the rows of one source for experts."""
        name = f"{unit.name}/{place}"
        kinds = self.cut.kinds.count
        return RowKernel(random=self.random, name=name, sources=1, experts=experts, kinds=kinds)

    def _backward_of_rows(
        self, slopes: dict[str, Numbers], unit: Unit, place: int, *, micro_batch: int
    ) -> Numbers:
        """Return the gradients of a segment of experts: sums over the rows of each replica."""
        segment = unit.segments[place]
        assert segment.experts
        inputs, made = self._saved_rows[unit.name, place, micro_batch]
        kept = inputs[segment.adds :] if segment.saves_input else []
        trained = self.model.trained_of(segment)
        wanted = self.wanted(segment)
        gradients, towards = self._rows(unit, place, segment.experts).backward(
            [*kept, *made[len(segment.outputs) :]],
            [self._parameters[name] for name in segment.parameters],
            [slopes[value.name] for value in segment.outputs if value.name in slopes],
            trained=[segment.parameters.index(name) for name in trained],
            wanted=len(wanted),
        )
        for value, towards_value in zip(wanted, towards, strict=True):
            gradient = self._kept(towards_value, value)
            known = slopes.get(value)
            slopes[value] = gradient if known is None else total(known, gradient)
        return np.concatenate(gradients, axis=-1) if gradients else NOTHING

    def slope(self, name: str, slopes: Sequence[Numbers]) -> Numbers:
        """Return a linear combination of the gradients of all outputs, shape (2, ..., 1)."""
        found = digest(self.random, f"{name}/slope0", slopes[0]) if slopes else None
        for place, each in enumerate(slopes[1:], 1):
            assert found is not None
            found = total(found, digest(self.random, f"{name}/slope{place}", each))
        if found is None:
            return np.zeros((2, *(1,) * (self.cut.dimensions - 1)), np.uint64)
        return found

    def _towards(
        self, name: str, made: Application, segment: Segment, wanted: Sequence[str]
    ) -> tuple[Numbers, list[int]]:
        counts = [len(self.cut.parameters[each]) for each in self.model.trained_of(segment)]
        counts += [
            self.cut.shared[each]
            if self._is_shared(segment, each)
            else self._pieces(each, whole=segment.reads_gathered, joined=segment.reads_all)
            for each in wanted
        ]
        ends = list(accumulate(counts))
        count = ends[-1] if ends else 0
        saved = [] if made.saved is None else [made.saved]
        read = [*made.kept, *saved, *made.parameters]
        if made.kept or saved:
            return self.random.draw((*spread(*read), count)), ends
        # A function that does not read the micro-batch is the same for all of them.
        if name not in self._alike:
            shape = spread(*read) if read else (1,) * len(self.cut.shape)
            self._alike[name] = self.random.draw((*shape, count))
        return self._alike[name], ends
