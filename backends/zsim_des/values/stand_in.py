"""Stand-ins for a model and its optimizer: functions of whole numbers modulo a prime.

They depend on the same inputs as the real functions, and are linear in the same ones: a gradient is
linear in the output gradient (so a loss scale cancels), and in nothing else. Every input element
enters squared and with a factor of its position, so a term that is stale, missing, doubled or out
of place changes the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from zsim.strategy.optimizer_rule import LEARNING_RATE, ClipNorm, Optimizer, constants_of
from zsim_des.values.field import (
    PRIME,
    Numbers,
    constants,
    dot,
    inverse,
    joined,
    modulo,
    number,
    product,
    reduced,
    times,
)


def _digest(name: str, parts: Sequence[Numbers]) -> float:
    """Return one number that depends on every element of `parts`."""
    whole = joined(parts)
    if not whole.size:
        return 0.0
    curved = product(whole, whole + constants(f"{name}/shift", whole.size))
    return dot(curved, constants(name, whole.size))


def common_value(numbers: Numbers) -> float:
    """Return the common value of `numbers`; NaN if they differ, 0 if there are none."""
    if not numbers.size:
        return 0.0
    first = float(numbers[0])
    return first if bool((numbers == first).all()) else float("nan")


@dataclass(frozen=True, slots=True)
class Forward:
    """Results of a segment: its outputs, and the number that fills its saved tensors."""

    outputs: list[Numbers]
    saved: float


def forward(
    name: str, inputs: Sequence[Numbers], parameters: Sequence[Numbers], sizes: Sequence[int]
) -> Forward:
    """Run the forward of segment `name`; `sizes` are the sizes of its outputs."""
    seen = (_digest(f"{name}/input", inputs) + _digest(f"{name}/parameter", parameters)) % PRIME
    square = times(seen, seen)
    outputs: list[Numbers] = []
    for place, size in enumerate(sizes):
        slope = product(constants(f"{name}/output{place}", size), square)
        outputs.append(reduced(slope + constants(f"{name}/offset{place}", size) * seen))
    return Forward(outputs, (square + times(3.0, seen) + 1) % PRIME)


def slope_of(name: str, slopes: Sequence[Numbers]) -> float:
    """Reduce the gradients of a segment's outputs to one number, linear in each of them."""
    incoming = joined(slopes)
    return dot(incoming, constants(f"{name}/slope", incoming.size))


@dataclass(frozen=True, slots=True)
class Backward:
    """Gradients of inputs and of parameters, in their order."""

    inputs: list[Numbers]
    parameters: list[Numbers]


def backward(
    name: str,
    *,
    inputs: Sequence[Numbers],
    saved: Sequence[Numbers],
    parameters: Sequence[Numbers],
    slope: float,
    sizes: Sequence[int],
) -> Backward:
    """Run the segment called `name` backward.

    Args:
        name: name of the unit and segment.
        inputs: kept inputs of its forward.
        saved: tensors that its forward saved.
        parameters: in the order of the segment.
        slope: the reduced gradient of its outputs; see `slope_of`.
        sizes: elements of the inputs whose gradient is wanted.
    """
    seen = _digest(f"{name}/kept", inputs) + _digest(f"{name}/parameter", parameters)
    seen = (seen + times(7.0, sum(map(common_value, saved)) % PRIME)) % PRIME
    square = times(seen, seen)
    whole = joined(parameters)
    own = product(constants(f"{name}/gradient", whole.size), square)
    gradients = product(reduced(own + whole * ((seen + 1) % PRIME)), slope)
    towards = (square + 5 * seen + 1) % PRIME
    to_inputs = [
        product(product(constants(f"{name}/to{place}", size), towards), slope)
        for place, size in enumerate(sizes)
    ]
    ends = np.cumsum([len(parameter) for parameter in parameters])[:-1].tolist()
    split = np.split(gradients, ends) if parameters else []
    return Backward(to_inputs, list(split))


def updated(
    rule: Optimizer,
    gradient: Numbers,
    trained: Numbers,
    states: Sequence[Numbers],
    *,
    rate: float,
    step: float,
) -> list[Numbers]:
    """Return new values of the parameter and of each state.

    Each is a function of the gradient, the parameter and all states, element by element, with
    factors that depend on the constants of the rule, and on `step` if the rule counts steps. Zeros,
    as in padding, stay zero. The learning rate scales the change of the parameter.
    """
    name, counted = _named(rule), number(step) if rule.counts_steps else 0.0
    read = [gradient, trained, *states]
    made: list[Numbers] = []
    for place in range(1 + len(states)):
        linear, curved = np.split(constants(f"{name}/{place}", 2 * len(read)), 2)
        found = np.zeros(len(trained))
        for each, factor, other in zip(read, linear, curved, strict=True):
            shifted = reduced(product(each, float(other)) + times(counted, float(factor)))
            found = reduced(found + product(each, reduced(shifted + float(factor))))
        made.append(found)
    return [reduced(trained + product(made[0], number(-rate))), *made[1:]]


@cache
def _named(rule: Optimizer) -> str:
    """Return a name with all constants of a rule but its rate, which may be a host scalar."""
    constants = [name for name in constants_of(rule) if name != LEARNING_RATE]
    values = ", ".join(f"{name}={getattr(rule, name)!r}" for name in constants)
    return f"{type(rule).__name__}({values})"


def clipped(rule: ClipNorm, squares: float, gradient: Numbers, scale: float) -> Numbers:
    """Return the clipped gradient; `squares` is the squared norm of gradients times `scale`."""
    below = inverse(number(scale))
    constant = number(rule.maximum) + times(5.0, number(rule.epsilon))
    return product(gradient, modulo(times(squares, below, below) + constant))
