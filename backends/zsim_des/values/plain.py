"""Plain data parallelism, computed directly: the result that every schedule must reproduce.

This module reads no schedule: every replica runs every unit forward and backward on its
micro-batches, gradients are averaged over all of them, and the optimizer is applied to whole
parameters. Frozen parameters keep their initial values and have no gradient.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from zsim.model.model import Model, Parameter
from zsim.schedule.issue_order import NO_OVERFLOW
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.state import GOOD_STEPS, LOSS_SCALE, SKIPPED_STEPS, STEP, WARM_UP
from zsim_des.values import stand_in
from zsim_des.values.field import Numbers, dot, inverse, product, reduced
from zsim_des.values.plain_pass import PlainPass, Tensors, trainable
from zsim_des.values.truth import Part, given, initial

TENSOR = "tensor"
LARGEST_SCALE = 2.0**53
"""Largest loss scale: above it float64 cannot represent every whole number."""


@dataclass(slots=True)
class PlainState:
    """Parameters on each rank of the tensor axis, with their optimizer moments.

    `scalars` are the host scalars by name, equal on every rank. If updates are delayed, `late` is
    the state after applying the last gradients, with which no step has computed.
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

    If updates are delayed, a step after the warm-up applies its gradients at the end of the next
    step (Ren et al. 2021, section 5.2).
    """
    state = _begin(model, strategy)
    late: list[tuple[int, float, Tensors]] = []
    for step in range(steps):
        gradients = _mean_gradients(model, strategy, state, step)
        overflows = step in overflow_steps
        _apply(model, strategy, state, late)
        count(strategy, state.scalars, overflows=overflows)
        late = [] if overflows else [(step, state.scalars[STEP], gradients)]
        delays = strategy.delays_updates and step >= strategy.offload.warm_up_steps
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
    """Return the host scalars before the first step."""
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
    """Update the host scalars after a step; loss scale as in Micikevicius et al. 2018, sec. 3.2."""
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
    """Return the part of `parameter` that rank number `place` of the tensor axis holds."""
    shared = model.tensor == 1 or not parameter.tensor_sharded
    return () if shared else ((TENSOR, place),)


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
            name: [np.zeros(len(value)) for _ in _rule(strategy, name).states]
            for name, value in own.items()
            if name in trainable(model)
        }
        for own in parameters
    ]
    return PlainState(parameters, moments, scalars(strategy))


def _rule(strategy: Strategy, name: str) -> Optimizer:
    """Return the rule that updates a parameter: of the first matching group, or the default."""
    for group in strategy.train.groups:
        for pattern in group.parameters:
            if fnmatchcase(name, pattern):
                return group.rule
    return strategy.train.optimizer


def _mean_gradients(model: Model, strategy: Strategy, state: PlainState, step: int) -> Tensors:
    """Return the gradients averaged over all replicas and micro-batches."""
    trains = trainable(model)
    total: Tensors = [
        {name: np.zeros(len(value)) for name, value in own.items() if name in trains}
        for own in state.parameters
    ]
    micro_batches = strategy.train.gradient_accumulation_steps
    members = strategy.parallel.context
    for first in range(0, strategy.replicas, members):
        runs: list[PlainPass] = []
        for micro_batch in range(micro_batches):
            which = [(first + member, step, micro_batch) for member in range(members)]
            runs.append(PlainPass(model, state.parameters, which))
        state.losses += [run.losses[member] for member in range(members) for run in runs]
        for run in runs:
            for place, own in enumerate(run.gradients):
                sums = total[place % model.tensor]
                for name, gradient in own.items():
                    sums[name] = reduced(sums[name] + gradient)
    share = inverse(strategy.replicas * micro_batches)
    return [{name: product(value, share) for name, value in own.items()} for own in total]


def _update(
    model: Model,
    strategy: Strategy,
    state: PlainState,
    gradients: Tensors,
    *,
    step: int,
    number: float,
) -> None:
    """Update with the gradients of `step`; `number` is the number of this update."""
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
            trained[name], *moments[name] = stand_in.updated(
                optimizer, used, trained[name], moments[name], rate=rate, step=number
            )
