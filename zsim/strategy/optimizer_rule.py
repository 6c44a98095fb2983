"""Update rules for gradients and parameters, with their constants.

A package registers a rule as an entry point of the group "zsim.optimizers": its name in a scenario,
and a subclass of `Optimizer`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Final

from zsim.entry_point import EntryPointError, duplicate, entries, load
from zsim.strategy.config_table import Flag, Fraction, NotNegative

GROUP = "zsim.optimizers"

Rate = float | str
"""A learning rate: a number, or the name of the host scalar that holds it."""

LEARNING_RATE = "learning_rate"
"""The name of that scalar if a scenario sets the rate for each step."""

Tensor = Any
"""A tensor of a backend, with the methods of `torch.Tensor`; zsim does not import torch here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(ABC):
    """An update rule: its constants are the fields, with types that a scenario file can check.

    Class attributes:
        element_wise: each element is updated from the same element of the gradient and the states.
        fused: the operator of torch that applies the rule as a whole, if backends use one; it
            writes the trained tensor and the states in order, and reads numbers of `arguments`.
        quantized: states are in 8 bits, with scales of blocks.
        of_loads: the gradient is the load of all experts of a layer, and the rule has no name in a
            scenario.
        torch: classes of `torch.optim` whose step this rule is, with their conditions in words; the
            first class names the constants of the rule.
    """

    element_wise: ClassVar[bool] = True
    fused: ClassVar[str] = ""
    quantized: ClassVar[bool] = False
    of_loads: ClassVar[bool] = False
    torch: ClassVar[Mapping[str, str]] = {}

    learning_rate: Rate = 1e-3

    @staticmethod
    def kinds() -> tuple[type["Optimizer"], ...]:
        """Return all rules, of zsim and of installed packages."""
        return (*rules().values(), ExpertBias)

    @property
    def states(self) -> tuple[str, ...]:
        """Return names of the numbers kept for each element, as in the state of torch's class."""
        return ()

    @property
    def moments(self) -> int:
        """Numbers kept for each element."""
        return len(self.states)

    @property
    def counts_steps(self) -> bool:
        """Return True if an update reads the number of the step, from 1."""
        return False

    @property
    @abstractmethod
    def flops(self) -> int:
        """FLOPs of an update per element."""

    @property
    def summary(self) -> str:
        """Return the rule in a few words."""
        rate = self.learning_rate
        return (
            f"{type(self).__name__} {f'with any {rate}' if isinstance(rate, str) else f'{rate:g}'}"
        )

    @property
    @abstractmethod
    def arguments(self) -> Iterator[tuple[str, float]]:
        """Yield the constants that an update passes to calls of torch, each with its meaning.

        A learning rate that the host holds is left out.
        """

    @abstractmethod
    def update(
        self,
        gradient: Tensor,
        trained: Tensor,
        states: Sequence[Tensor],
        *,
        rate: float,
        step: float,
    ) -> None:
        """Update `trained` and `states` in place; all are flat and of equal size.

        `rate` is the learning rate, and `step` the number of the update if the rule counts steps.
        """

    @classmethod
    def reads(cls, group: Mapping[str, Any]) -> bool:
        """Return True if the rule has the step of a torch optimizer with the constants `group`."""
        del group
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1, with bias correction; decay as in AdamW)."""

    fused: ClassVar[str] = "_fused_adamw_"
    torch: ClassVar[Mapping[str, str]] = {"AdamW": "AdamW", "Adam": "Adam without weight_decay"}

    learning_rate: Rate = 1e-3
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """Return averages of the gradient and of its square."""
        return "exp_avg", "exp_avg_sq"

    @property
    def counts_steps(self) -> bool:
        """Return True, for the bias correction."""
        return True

    @property
    def flops(self) -> int:
        """Return 12: 2 moments of 3, the step of 6 (Kingma and Ba 2015, alg. 1)."""
        return 12

    @property
    def arguments(self) -> Iterator[tuple[str, float]]:
        """Yield the arguments of the fused operator."""
        if not isinstance(self.learning_rate, str):
            yield "learning rate", self.learning_rate
        yield "beta1", self.beta1
        yield "beta2", self.beta2
        yield "epsilon", self.epsilon
        yield "decay", self.weight_decay

    def update(
        self,
        gradient: Tensor,
        trained: Tensor,
        states: Sequence[Tensor],
        *,
        rate: float,
        step: float,
    ) -> None:
        """Update in the order of `torch.optim.AdamW` without its fused operator."""
        first, second = states
        trained.mul_(1 - rate * self.weight_decay)
        first.lerp_(gradient, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        correction = (1 - self.beta2**step) ** 0.5
        size = (second.sqrt() / correction).add_(self.epsilon)
        trained.addcdiv_(first, size, value=-rate / (1 - self.beta1**step))

    @classmethod
    def reads(cls, group: Mapping[str, Any]) -> bool:
        """Return True if weights decay apart from the gradient, or not at all."""
        return bool(group.get("decoupled_weight_decay", True)) or not group["weight_decay"]


STATES_BLOCK: Final = 256
"""Elements of a moment that share a scale: `block_wise` in `Optimizer2State`."""

STATES_LEAST: Final = 4096
"""Moments of smaller tensors stay in fp32: `min_8bit_size`."""

SCALE_BYTES: Final = 4
"""Bytes of a scale, and of an element of a moment that stays in fp32."""


def scale_elements(tensors: Iterable[int]) -> int:
    """Return the number of fp32 scales of one moment of tensors with these elements.

    A tensor in 8 bits has one scale for each block. A tensor that stays in fp32 counts three
    quarters of its elements instead, since one byte is counted for each element of a moment.
    """
    found = 0
    for elements in tensors:
        whole = elements < STATES_LEAST
        found += -(-3 * elements // SCALE_BYTES) if whole else -(-elements // STATES_BLOCK)
    return found


@cache
def codes(*, signed: bool) -> tuple[float, ...]:
    """Return the values of the 8-bit format, ascending: a dynamic exponent and a linear fraction.

    `create_dynamic_map` of bitsandbytes, with seven exponent bits.
    """
    exponents, found = 7, [0.0, 1.0]
    for exponent in range(exponents):
        fractions = 2 ** (exponent + (0 if signed else 1)) + 1
        edges = [0.1 + 0.9 * number / (fractions - 1) for number in range(fractions)]
        means = [(low + high) / 2 for low, high in pairwise(edges)]
        scale = 10.0 ** (exponent - exponents + 1)
        found += [sign * scale * mean for mean in means for sign in ((1, -1) if signed else (1,))]
    return tuple(sorted(found))


def rounded(moment: Tensor, *, signed: bool) -> None:
    """Round a flat moment in place to the nearest code of its block, times the block's maximum."""
    elements = moment.numel()
    if elements < STATES_LEAST:
        return
    table = moment.new_tensor(codes(signed=signed))
    middle = (table[1:] + table[:-1]) / 2
    for start in range(0, elements, STATES_BLOCK):
        part = moment[start : start + STATES_BLOCK]
        largest = float(part.abs().max())
        if largest:
            places = ((part / largest).unsqueeze(-1) > middle).sum(-1)
            part.copy_(table[places] * largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam8bit(Adam):
    """`AdamW8bit` of bitsandbytes, `adamw_bnb_8bit` of transformers: moments in 8 bits.

    Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", section 2; bitsandbytes
    0.45 (`optim/optimizer.py`, `functional.py`). torchao's `AdamW8bit` has the same blocks.
    """

    fused: ClassVar[str] = ""
    torch: ClassVar[Mapping[str, str]] = {}
    quantized: ClassVar[bool] = True

    @property
    def flops(self) -> int:
        """Return 30: Adam's 12, and 8 comparisons and a product to round each moment."""
        return super(Adam8bit, self).flops + 18

    def update(
        self,
        gradient: Tensor,
        trained: Tensor,
        states: Sequence[Tensor],
        *,
        rate: float,
        step: float,
    ) -> None:
        """Update as Adam with the moments as they were rounded, then round the new ones."""
        super(Adam8bit, self).update(gradient, trained, states, rate=rate, step=step)
        first, second = states
        rounded(first, signed=True)
        rounded(second, signed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAdam8bit(Adam8bit):
    """`PagedAdamW8bit`: moments in unified memory, which the driver moves to the host if needed.

    zsim counts them on the device. It reports that a training does not fit if it needs paging.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent as `torch.optim.SGD`, without dampening.

    First, `weight_decay` times the parameter is added to the gradient. With `momentum`, a buffer
    becomes momentum * buffer + gradient and replaces the gradient; with `nesterov`, gradient +
    momentum * buffer does. The buffer starts at zero, so that after the first step it is the
    gradient, as in PyTorch.
    """

    torch: ClassVar[Mapping[str, str]] = {"SGD": "SGD"}

    learning_rate: Rate = 1e-2
    momentum: Fraction = 0.0
    weight_decay: NotNegative = 0.0
    nesterov: Flag = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum of more than 0")

    @property
    def states(self) -> tuple[str, ...]:
        """Return the momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def flops(self) -> int:
        """Return 2 for the step and 2 for each constant that is used."""
        return 2 * (1 + bool(self.momentum) + bool(self.weight_decay) + self.nesterov)

    @property
    def summary(self) -> str:
        """Return the rate and the momentum."""
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        return f"{super(SGD, self).summary}{momentum}"

    @property
    def arguments(self) -> Iterator[tuple[str, float]]:
        """Yield constants that are not 0; the rate is subtracted."""
        if not isinstance(self.learning_rate, str):
            yield "learning rate", -self.learning_rate
        for what, number in (("momentum", self.momentum), ("decay", self.weight_decay)):
            if number:
                yield what, number

    def update(
        self,
        gradient: Tensor,
        trained: Tensor,
        states: Sequence[Tensor],
        *,
        rate: float,
        step: float,
    ) -> None:
        """Update as `torch.optim.SGD`; the momentum buffer starts at zero."""
        del step
        if self.weight_decay:
            gradient = gradient.add(trained, alpha=self.weight_decay)
        for buffer in states:
            buffer.mul_(self.momentum).add_(gradient)
            gradient = gradient.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        trained.add_(gradient, alpha=-rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBias(Optimizer):
    """Add the rate to biases of experts with few rows; subtract it from those with many.

    The gradient is the load of each expert; the sign of its difference from the mean decides (Wang
    et al. 2024, "Auxiliary-loss-free load balancing"; `get_updated_expert_bias` of
    megatron/core/transformer/moe/moe_utils.py in August 2026, d98e8a64).
    """

    element_wise: ClassVar[bool] = False
    of_loads: ClassVar[bool] = True

    learning_rate: Rate = 1e-3

    @property
    def flops(self) -> int:
        """Return 4: for the mean, the difference, the product and the sum."""
        return 4

    @property
    def arguments(self) -> Iterator[tuple[str, float]]:
        """Yield the rate."""
        if not isinstance(self.learning_rate, str):
            yield "learning rate", self.learning_rate

    def update(
        self,
        gradient: Tensor,
        trained: Tensor,
        states: Sequence[Tensor],
        *,
        rate: float,
        step: float,
    ) -> None:
        """Move the biases of all experts of a layer, given their loads."""
        del states, step
        trained.add_((gradient.mean() - gradient).sign(), alpha=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipNorm:
    """Scale gradients so that their global 2-norm is at most `maximum`.

    The coefficient is min(1, maximum / (norm + epsilon)), as in torch.nn.utils.clip_grad_norm_.
    """

    maximum: float
    epsilon: float = 1e-6


@cache
def rules() -> Mapping[str, type[Optimizer]]:
    """Return every rule by its name in a scenario.

    Raises:
        EntryPointError: a name or a class name is registered twice, or an object is no rule.
    """
    found: dict[str, type[Optimizer]] = {
        "adam": Adam,
        "sgd": SGD,
        "adamw_8bit": Adam8bit,
        "paged_adamw_8bit": PagedAdam8bit,
    }
    for entry in entries(GROUP):
        rule = load(entry)
        if not (isinstance(rule, type) and issubclass(rule, Optimizer)):
            raise EntryPointError(f"{GROUP}: {entry.name!r}: {rule!r} must be a class of Optimizer")
        if entry.name in found or rule.__name__ in {each.__name__ for each in found.values()}:
            raise duplicate(entry)
        found[entry.name] = rule
    return found


def name_of(rule: Optimizer) -> str:
    """Return the name of a rule in a scenario."""
    return next(name for name, kind in rules().items() if kind is type(rule))


def constants_of(rule: Optimizer | type[Optimizer]) -> tuple[str, ...]:
    """Return the names of a rule's constants, the learning rate first."""
    return tuple(each.name for each in fields(rule))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with a separate rule, like one of `param_groups` in PyTorch.

    `parameters` are `fnmatch` patterns of names, such as `*.bias`.
    """

    parameters: tuple[str, ...]
    rule: Optimizer

    def holds(self, name: str) -> bool:
        """Return True if the parameter called `name` is in the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)


def rate_of(rule: Optimizer, scalars: Mapping[str, float]) -> float:
    """Return the learning rate of a rule, given the host's scalars."""
    rate = rule.learning_rate
    return scalars[rate] if isinstance(rate, str) else rate


def settled(rule: Optimizer, scalars: Mapping[str, float]) -> Optimizer:
    """Return the rule with a number as its learning rate."""
    return replace(rule, learning_rate=rate_of(rule, scalars))


Rule = Optimizer | ClipNorm
