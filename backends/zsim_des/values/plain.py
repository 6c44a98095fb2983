"""Plain data parallelism, computed directly: what every schedule has to arrive at.

No schedule is read here: every replica runs every unit forward and backward on its micro-batches,
gradients are averaged over all of them, and the optimizer is applied to whole parameters. Frozen
ones stay as they were in the beginning, and there is nothing that could be a gradient of them.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from zsim.model.generator import Draws
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit
from zsim.schedule.issue_order import NO_OVERFLOW
from zsim.strategy.optimizer_rule import SGD, Adam, ClipNorm
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.state import GOOD_STEPS, LOSS_SCALE, SKIPPED_STEPS, STEP, WARM_UP
from zsim_des.values import stand_in
from zsim_des.values.field import Numbers, dot, inverse, product, reduced
from zsim_des.values.truth import Part, data, given, initial, mask

TENSOR = "tensor"
LARGEST_SCALE = 2.0**53
"""Beyond it a host does not count: whole numbers have gaps."""

Tensors = list[dict[str, Numbers]]
"""By rank of the tensor axis, tensors by name."""


@dataclass(slots=True)
class PlainState:
    """Parameters on each rank of the tensor axis, and the optimizer's moments of them.

    `scalars` are what the host of every rank has counted, by name. Where updates are delayed,
    `late` is the state with the last gradients applied, which no step has computed with.
    """

    parameters: Tensors
    moments: list[dict[str, list[Numbers]]]
    scalars: dict[str, float]
    losses: list[float] = field(default_factory=list[float])
    late: "PlainState | None" = None


def train(
    model: Model, strategy: Strategy, steps: int, overflow_steps: frozenset[int] = NO_OVERFLOW
) -> PlainState:
    """Return the state after `steps` steps; those in `overflow_steps` change nothing.

    Where updates are delayed, a step that is not of the warm-up leaves its gradients to the end of
    the next one (Ren et al. 2021, section 5.2).
    """
    state = _begin(model, strategy)
    late: list[tuple[int, float, Tensors]] = []
    for step in range(steps):
        gradients = _mean_gradients(model, strategy, state, step)
        overflows = step in overflow_steps
        _apply(model, strategy, state, late)
        count(strategy, state.scalars, overflows=overflows)
        late = [] if overflows else [(step, state.scalars[STEP], gradients)]
        delays = strategy.offload.delayed_update and step >= strategy.offload.warm_up_steps
        if not delays:
            _apply(model, strategy, state, late)
            late = []
    if late:
        state.late = deepcopy(state)
        _apply(model, strategy, state.late, late)
    return state


def _apply(
    model: Model, strategy: Strategy, state: PlainState, late: list[tuple[int, float, Tensors]]
) -> None:
    for step, number, gradients in late:
        _update(model, strategy, state, gradients, step=step, number=number)


def scalars(strategy: Strategy) -> dict[str, float]:
    """Return what hosts know before the first step."""
    found = {STEP: 0.0}
    if strategy.offload.warm_up_steps:
        found[WARM_UP] = float(strategy.offload.warm_up_steps)
    if strategy.train.precision is Precision.FP16:
        found |= {
            LOSS_SCALE: strategy.train.loss_scale.initial,
            GOOD_STEPS: 0.0,
            SKIPPED_STEPS: 0.0,
        }
    return found


def count(strategy: Strategy, known: dict[str, float], *, overflows: bool) -> None:
    """Count a step, as Micikevicius et al. 2018, section 3.2, have it with a loss scale."""
    rule = strategy.train.loss_scale
    known[STEP] += not overflows
    if WARM_UP in known:
        known[WARM_UP] = max(0.0, known[WARM_UP] - 1)
    if LOSS_SCALE not in known:
        return
    if overflows:
        known[LOSS_SCALE] = max(known[LOSS_SCALE] * rule.backoff, rule.minimum)
        known[GOOD_STEPS] = 0.0
        known[SKIPPED_STEPS] += 1
        return
    known[GOOD_STEPS] += 1
    if known[GOOD_STEPS] % rule.interval == 0:
        known[LOSS_SCALE] = min(known[LOSS_SCALE] * rule.growth, LARGEST_SCALE)


def part_of(model: Model, parameter: Parameter, place: int) -> Part:
    """Return which part of `parameter` rank number `place` of the tensor axis has."""
    shared = model.tensor == 1 or not parameter.tensor_sharded
    return () if shared else ((TENSOR, place),)


def trainable(model: Model) -> frozenset[str]:
    """Names of the parameters that an optimizer is given."""
    return frozenset(each.name for each in model.parameters if not each.frozen)


def _begin(model: Model, strategy: Strategy) -> PlainState:
    parameters: Tensors = [
        {
            each.name: initial(each.name, each.elements, part_of(model, each, place))
            for each in model.parameters
        }
        for place in range(model.tensor)
    ]
    moments = [
        {
            name: [np.zeros(len(value)) for _ in range(_kept(_rule(strategy, name)))]
            for name, value in own.items()
            if name in trainable(model)
        }
        for own in parameters
    ]
    return PlainState(parameters, moments, scalars(strategy))


def _rule(strategy: Strategy, name: str) -> Adam | SGD:
    """Return what updates a parameter: the first group that has its name, or the optimizer."""
    for group in strategy.train.groups:
        for pattern in group.parameters:
            if fnmatchcase(name, pattern):
                return group.rule
    return strategy.train.optimizer


def _kept(optimizer: Adam | SGD) -> int:
    """Return how many numbers beside each parameter an optimizer needs from step to step."""
    match optimizer:
        case Adam():
            return 2
        case SGD(momentum=0):
            return 0
        case SGD():
            return 1


def _mean_gradients(model: Model, strategy: Strategy, state: PlainState, step: int) -> Tensors:
    """Averaged over all replicas and micro-batches."""
    trains = trainable(model)
    total: Tensors = [
        {name: np.zeros(len(value)) for name, value in own.items() if name in trains}
        for own in state.parameters
    ]
    micro_batches = strategy.train.gradient_accumulation_steps
    for replica in range(strategy.replicas):
        for micro_batch in range(micro_batches):
            batch = data(replica, step, micro_batch, model.batch.elements)
            run = _Run(model, state.parameters, batch, (replica, step, micro_batch))
            state.losses.append(run.loss)
            for place, own in enumerate(run.gradients):
                for name, gradient in own.items():
                    total[place][name] = reduced(total[place][name] + gradient)
    share = inverse(strategy.replicas * micro_batches)
    return [{name: product(value, share) for name, value in own.items()} for own in total]


class _Run:
    """One micro-batch on one replica: forward through all units, and backward."""

    def __init__(
        self, model: Model, parameters: Tensors, batch: Numbers, which: tuple[int, int, int]
    ) -> None:
        self._model = model
        self._which = which
        self._parameters = parameters
        self._places = range(model.tensor)
        self._values: Tensors = [{BATCH: batch} for _ in self._places]
        self._saved: list[dict[tuple[str, int], float]] = [{} for _ in self._places]
        self._slopes: Tensors = [{model.loss.name: np.ones(1)} for _ in self._places]
        self._trainable = trainable(model)
        self.gradients: Tensors = [
            {name: np.zeros(len(each)) for name, each in own.items() if name in self._trainable}
            for own in parameters
        ]
        for unit in model.units:
            for position in range(len(unit.segments)):
                self._forward(unit, position)
        self.loss = float(self._values[0][model.loss.name][0])
        for unit in reversed(model.units):
            for position in reversed(range(len(unit.segments))):
                if self._is_differentiated(unit.segments[position]):
                    self._backward(unit, position)

        if any(value.tensor_sharded for value in model.values.values()):
            self._add_up_copies()

    def _is_differentiated(self, segment: Segment) -> bool:
        """Return whether autograd goes through a segment: to what it trains, or further back."""
        asked = any(value.requires_gradient for value in segment.outputs)
        return asked or not self._trainable.isdisjoint(segment.parameters)

    def _add_up_copies(self) -> None:
        """Of parameters that all places have, each has the gradient of its own tokens."""
        for parameter in self._model.parameters:
            name = parameter.name
            if not parameter.tensor_sharded and name in self._trainable:
                total = reduced(np.sum([own[name] for own in self.gradients], axis=0))
                for own in self.gradients:
                    own[name] = total

    def _cut(self, name: str) -> bool:
        return self._model.values[name].tensor_sharded

    def _inputs(self, place: int, segment: Segment) -> list[Numbers]:
        """Return what a segment reads: its own part, or all where ranks make the same or sum."""
        whole = segment.reduces_input_gradient or segment.gathers_input
        return [
            self._together(self._values, name)
            if whole and self._cut(name)
            else self._values[place][name]
            for name in segment.inputs
        ]

    def _together(self, tensors: Tensors, name: str) -> Numbers:
        return np.concatenate([own[name] for own in tensors])

    def _elements(self, names: Sequence[str], *, whole: bool) -> list[int]:
        values = [self._model.values[name] for name in names]
        places = len(self._places)
        return [
            value.elements * (places if whole and value.tensor_sharded else 1) for value in values
        ]

    def _own(self, made: list[list[Numbers]], names: Sequence[str]) -> list[list[Numbers]]:
        """Sum over all places; each keeps its own tokens where they are cut."""
        sums = _summed(made)
        for place, own in enumerate(sums):
            for index, name in enumerate(names):
                if self._cut(name):
                    own[index] = np.split(own[index], len(self._places))[place]
        return sums

    def _forward(self, unit: Unit, position: int) -> None:
        segment = unit.segments[position]
        made: list[list[Numbers]] = []
        for place in self._places:
            name, drawn = f"{unit.name}/{position}", ""
            if segment.draws is not None:
                own = place if segment.draws is Draws.APART else None
                drawn = mask(self._which, name, own)
            done = stand_in.forward(
                f"{name}{drawn}",
                self._inputs(place, segment),
                [self._parameters[place][name] for name in segment.parameters],
                self._elements(
                    [value.name for value in segment.outputs], whole=segment.reduces_output
                ),
            )
            made.append(done.outputs)
            self._saved[place][unit.name, position] = done.saved
        if segment.reduces_output:
            made = self._own(made, [value.name for value in segment.outputs])
        for place, outputs in enumerate(made):
            for value, output in zip(segment.outputs, outputs, strict=True):
                self._values[place][value.name] = output

    def _backward(self, unit: Unit, position: int) -> None:
        segment = unit.segments[position]
        wanted = [name for name in segment.inputs if self._model.values[name].requires_gradient]
        made: list[list[Numbers]] = []
        for place in self._places:
            done = self._backward_on(place, unit, position, wanted)
            made.append(done.inputs)
            own = self.gradients[place]
            for name, gradient in zip(segment.parameters, done.parameters, strict=True):
                if name in own:
                    own[name] = reduced(own[name] + gradient)
        if segment.reduces_input_gradient:
            made = self._own(made, wanted)
        elif segment.gathers_input:
            made = [
                [
                    np.split(each, len(self._places))[place] if self._cut(name) else each
                    for name, each in zip(wanted, gradients, strict=True)
                ]
                for place, gradients in enumerate(made)
            ]
        for place, gradients in enumerate(made):
            slopes = self._slopes[place]
            for name, gradient in zip(wanted, gradients, strict=True):
                slopes[name] = reduced(slopes[name] + gradient) if name in slopes else gradient

    def _backward_on(
        self, place: int, unit: Unit, position: int, wanted: Sequence[str]
    ) -> stand_in.Backward:
        segment: Segment = unit.segments[position]
        slopes = {
            value.name: self._together(self._slopes, value.name)
            if segment.reduces_output and value.tensor_sharded
            else self._slopes[place][value.name]
            for value in segment.outputs
            if value.name in self._slopes[place]
        }
        saved = self._saved[place][unit.name, position]
        return stand_in.backward(
            f"{unit.name}/{position}",
            inputs=self._inputs(place, segment) if segment.saves_input else [],
            saved=[np.array([saved])] if segment.saved_bytes else [],
            parameters=[self._parameters[place][name] for name in segment.parameters],
            slopes=[slopes[value.name] for value in segment.outputs if value.name in slopes],
            sizes=self._elements(
                wanted, whole=segment.reduces_input_gradient or segment.gathers_input
            ),
        )


def _summed(made: Sequence[Sequence[Numbers]]) -> list[list[Numbers]]:
    """Every place has the sum over all places."""
    sums = [reduced(np.sum(parts, axis=0)) for parts in zip(*made, strict=True)]
    return [list(sums) for _ in made]


def _update(
    model: Model,
    strategy: Strategy,
    state: PlainState,
    gradients: Tensors,
    *,
    step: int,
    number: float,
) -> None:
    """Update with the gradients of a step, whose update has a number."""
    squares = 0.0
    trains = trainable(model)
    for parameter in model.parameters:
        if parameter.name not in trains:
            continue
        copies = 1 if not parameter.tensor_sharded else model.tensor
        for own in gradients[:copies]:
            squares += dot(own[parameter.name], own[parameter.name])
    for place, own in enumerate(gradients):
        for name, gradient in own.items():
            used = gradient
            if strategy.train.clip_norm is not None:
                rule = ClipNorm(maximum=strategy.train.clip_norm)
                used = stand_in.clipped(rule, reduced(np.array([squares])).item(), gradient, 1.0)
            trained, moments = state.parameters[place], state.moments[place]
            optimizer = _rule(strategy, name)
            rate = optimizer.learning_rate
            if isinstance(rate, str):
                rate = given(rate, step)
            match optimizer:
                case Adam() as adam:
                    trained[name], *moments[name] = stand_in.adam(
                        adam,
                        used,
                        trained[name],
                        moments[name],
                        rate=rate,
                        step=number,
                    )
                case SGD() as sgd:
                    trained[name], *moments[name] = stand_in.sgd(
                        sgd, used, trained[name], moments[name], rate=rate
                    )
