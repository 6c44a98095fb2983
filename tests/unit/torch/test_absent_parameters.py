"""What reads a parameter outside the forward that the schedule runs: told in one line, never wrong.

Each unit computes a gradient with what backward reads again: a silent read shows in training.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from drawn_clusters import NO_MODEL
from exact_training import cluster
from shared_ranks import SharedPools
from torch import nn
from torch.utils.checkpoint import checkpoint

from zsim.backend.backend import Job
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim_des.values import Carrier, carry
from zsim_torch.module.absent import AbsentParameterError
from zsim_torch.module.description import describe
from zsim_torch.module.unit import UnitRunError
from zsim_torch.supervise.rank_failure import RankFailedError
from zsim_torch.train import Option, train
from zsim_torch.values import TorchValues

Context = Any
"""What autograd gives a function of its own; torch names no type with attributes for it."""

SIZE = 4
STEPS = 3
UNITS = ("first", "second", "head")
STRATEGY = Strategy(
    zero=Zero(stage=3, bucket_elements=10),
    train=Train(precision=Precision.FP64, optimizer=SGD(learning_rate=0.1)),
)
STRATEGIES = [
    pytest.param(
        STRATEGY.but({"zero.stage": stage, "activations.checkpointing": recomputed}),
        id=f"{stage}-{recomputed}",
    )
    for stage in range(4)
    for recomputed in (Checkpointing.NONE, Checkpointing.FULL)
]


class Linear(nn.Module):
    """A linear layer with tanh, called through `how`."""

    def __init__(self, how: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.how = how

    def plain(self, value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(value)
        return made.tanh()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.plain(value) if self.how is None else self.how(self, value)


class Head(nn.Module):
    def forward(self, value: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return value.square().mean()


class Net(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head = first, second, Head()
        self.double()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.second(self.first(batch)))
        return loss


def net(first: Callable[[], nn.Module] = Linear, second: Callable[[], nn.Module] = Linear) -> Net:
    torch.manual_seed(3)
    return Net(first(), second())


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(2, SIZE, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def trained(module: Net, strategy: Strategy, *, poison: bool = False) -> None:
    """Train `module`; what it is described by is equal and reads nothing again."""
    model = describe(net(), UNITS, batches()[0], precision=Precision.FP64)
    option = Option(poison=poison)
    train(module, UNITS, make_schedule(model, strategy), batches(), steps=STEPS, option=option)


def in_a_plain_loop(module: Net) -> Net:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()
    return module


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, left), (_, right) in zip(
        one.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-14), name


def refused(module: Net, strategy: Strategy, match: str, *, late: bool = False) -> None:
    """`module` is refused in one line, and keeps its parameters, or has none if it is `late`."""
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    with pytest.raises(UnitRunError, match=match) as caught:
        trained(module, strategy)
    assert "\n" not in str(caught.value)
    after = dict(module.named_parameters())
    if late:
        with pytest.raises(AbsentParameterError, match="it has no value: its training failed"):
            module.state_dict()
    else:
        assert all(torch.equal(after[name], value) for name, value in before.items())


def checkpointed(unit: Linear, value: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    made: torch.Tensor = checkpoint(unit.plain, value, use_reentrant=reentrant)
    return made


@pytest.mark.parametrize("place", ["first", "second"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_torch_inside_a_unit_is_refused(
    strategy: Strategy, *, reentrant: bool, place: str
) -> None:
    how = partial(checkpointed, reentrant=reentrant)
    module = net(**{place: lambda: Linear(how)})
    refused(module, strategy, rf"^unit {place}: .*torch\.utils\.checkpoint")


def given_to_a_checkpoint(unit: Linear, value: torch.Tensor) -> torch.Tensor:
    """The weight is an argument of what runs again: torch saves it for backward."""
    made: torch.Tensor = checkpoint(
        lambda left, right: (left @ right.T).tanh(), value, unit.linear.weight, use_reentrant=False
    )
    return made + unit.linear.bias


def train_checkpointed(strategy: Strategy) -> None:
    how = partial(checkpointed, reentrant=False)
    trained(net(second=lambda: Linear(how)), strategy)


@pytest.mark.one_commit_in(6)
def test_real_ranks_end_with_one_line_that_names_the_unit(pool_of: SharedPools) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool_of(2).run(train_checkpointed, STRATEGY.but({"parallel.data": 2}))
    line, _, details = str(caught.value).partition(" (details: ")
    assert line == (
        f"rank {caught.value.rank}: UnitRunError: unit second: its backward reads parameter "
        "second.linear.weight, which is elsewhere by then (torch.utils.checkpoint? a hook?); let "
        "the schedule recompute (checkpointing full), save tensors with ctx.save_for_backward"
    )
    assert details.endswith(".txt)")


class ClosedOver(torch.autograd.Function):
    """The identity; its backward scales by the module's own bias."""

    @staticmethod
    def forward(ctx: Context, unit: Linear, value: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        return value.clone()

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradients[0] * ctx.unit.linear.bias.detach()


def closed_over(unit: Linear, value: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = ClosedOver.apply(unit, unit.plain(value))  # type: ignore[no-untyped-call]
    return made


def hooked(unit: Linear, value: torch.Tensor) -> torch.Tensor:
    made = unit.plain(value)
    if made.requires_grad:
        made.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient * unit.linear.bias.detach()
        )
    return made


@pytest.mark.parametrize("how", [closed_over, hooked])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_function_that_reads_its_module_at_backward_is_refused(
    strategy: Strategy, how: Callable[[Linear, torch.Tensor], torch.Tensor]
) -> None:
    module = net(second=lambda: Linear(how))
    refused(module, strategy, r"^unit second: its backward reads parameter second\.linear\.bias")


Part = Callable[[torch.Tensor], torch.Tensor]


class Keeping(torch.autograd.Function):
    """A product that keeps a part of its weight without a word to autograd."""

    @staticmethod
    def forward(
        ctx: Context, part: Part, value: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.kept, ctx.value = part(weight), value
        return value @ weight.T

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        return None, gradient @ ctx.kept, gradient.T @ ctx.value


class Saving(torch.autograd.Function):
    """The same product as it should be."""

    @staticmethod
    def forward(ctx: Context, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight.T

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,), (value, weight) = gradients, ctx.saved_tensors
        assert weight.shape == (SIZE, SIZE)
        return gradient @ weight, gradient.T @ value


def keeping(part: Part, unit: Linear, value: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = Keeping.apply(part, value, unit.linear.weight)  # type: ignore[no-untyped-call]
    return (made + unit.linear.bias).tanh()


def saving(unit: Linear, value: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = Saving.apply(value, unit.linear.weight)  # type: ignore[no-untyped-call]
    return (made + unit.linear.bias).tanh()


KEEPERS = {
    "tensor": partial(keeping, lambda weight: weight),
    "view": partial(keeping, lambda weight: weight.T.T),
    "detached": partial(keeping, lambda weight: weight.detach()),
    "data": partial(keeping, lambda weight: weight.data),
}


@pytest.mark.parametrize("how", KEEPERS.values(), ids=KEEPERS)
def test_a_kept_parameter_is_refused_where_it_is_gathered_into_other_memory(
    how: Callable[[Linear, torch.Tensor], torch.Tensor],
) -> None:
    module = net(second=lambda: Linear(how))
    refused(module, STRATEGY, r"^unit second: its backward reads memory that held a parameter")


@pytest.mark.parametrize("how", KEEPERS.values(), ids=KEEPERS)
@pytest.mark.parametrize(
    "strategy",
    [
        *(STRATEGY.but({"zero.stage": stage}) for stage in range(3)),
        STRATEGY.but({"zero.keep_after_forward": "everything"}),
        STRATEGY.but({"activations.checkpointing": Checkpointing.FULL, "zero.stage": 1}),
    ],
)
def test_a_kept_parameter_trains_as_in_a_plain_loop_where_its_memory_stays(
    strategy: Strategy, how: Callable[[Linear, torch.Tensor], torch.Tensor]
) -> None:
    module = net(second=lambda: Linear(how))
    trained(module, strategy)
    same(module, in_a_plain_loop(net(second=lambda: Linear(how))))


def smooth(unit: Linear, value: torch.Tensor) -> torch.Tensor:
    """A checkpoint that reads no parameter."""
    made: torch.Tensor = checkpoint(torch.tanh, unit.linear(value), use_reentrant=False)
    return made


@pytest.mark.matrix(9)
@pytest.mark.parametrize("how", [saving, smooth, given_to_a_checkpoint])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_gets_its_parameters_from_autograd_trains_as_in_a_plain_loop(
    strategy: Strategy, how: Callable[[Linear, torch.Tensor], torch.Tensor]
) -> None:
    module = net(lambda: Linear(how), lambda: Linear(how))
    trained(module, strategy, poison=True)
    same(module, in_a_plain_loop(net(lambda: Linear(how), lambda: Linear(how))))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_that_reads_a_parameter_of_another_one_is_refused(strategy: Strategy) -> None:
    first = Linear()
    other = first.linear.weight
    module = net(lambda: first, lambda: Linear(lambda unit, value: unit.plain(value) @ other))
    refused(module, strategy, r"^unit second: its forward reads parameter first\.linear\.weight")


class Remembering:
    """Reads the weight of its first call in all others; in a plain loop it is the parameter."""

    def __init__(self) -> None:
        self.weight: torch.Tensor | None = None

    def __call__(self, unit: Linear, value: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            self.weight = unit.linear.weight
        return (value @ self.weight + unit.linear.bias).tanh()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_that_reads_a_parameter_of_an_earlier_forward_is_refused(strategy: Strategy) -> None:
    module = net(second=lambda: Linear(Remembering()))
    line = "^unit second: its forward reads what another forward was given"
    late = strategy.activations.checkpointing is Checkpointing.NONE  # else its own recompute reads
    refused(module, strategy, line, late=late)


def test_a_unit_that_reads_what_another_one_left_behind_is_refused() -> None:
    left: list[torch.Tensor] = []

    def leaving(unit: Linear, value: torch.Tensor) -> torch.Tensor:
        left[:] = [unit.plain(value)]
        return left[0]

    def taking(unit: Linear, value: torch.Tensor) -> torch.Tensor:
        return unit.plain(value) + left[0]

    module = net(lambda: Linear(leaving), lambda: Linear(taking))
    refused(module, STRATEGY, "^unit second: its forward reads what another forward was given")


def test_a_parameter_is_refused_to_data_and_hooks_too_while_the_schedule_has_it() -> None:
    module = net()
    model = describe(module, UNITS, batches()[0], precision=Precision.FP64)

    def logged() -> Iterator[torch.Tensor]:
        for batch in batches():
            assert module.first.get_parameter("linear.weight").shape == (SIZE, SIZE)
            yield batch * module.first.get_parameter("linear.weight").mean()

    with pytest.raises(AbsentParameterError, match=r"^parameter first\.linear\.weight: it is read"):
        train(module, UNITS, make_schedule(model, STRATEGY), logged(), steps=STEPS)


def test_a_parameter_can_be_read_again_when_training_is_over() -> None:
    module = net()
    trained(module, STRATEGY)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert module(batches()[0]).isfinite()


def test_a_module_that_keeps_no_parameters_cannot_be_run() -> None:
    module = net()
    model = describe(module, UNITS, batches()[0], precision=Precision.FP64)
    option = Option(write_back=False)
    train(module, UNITS, make_schedule(model, STRATEGY), batches(), option=option)
    with pytest.raises(AbsentParameterError, match="it has no value"):
        module(batches()[0])


@pytest.mark.parametrize("how", [partial(checkpointed, reentrant=False), closed_over])
def test_a_simulated_run_with_tensors_refuses_the_same(
    how: Callable[[Linear, torch.Tensor], torch.Tensor],
) -> None:
    model = describe(net(), UNITS, batches()[0], precision=Precision.FP64)
    made = make_schedule(model, STRATEGY)
    module = net(second=lambda: Linear(how))
    values = TorchValues(made, module, UNITS, lambda _, step, __: batches()[step])
    job = Job(schedule=made, model=NO_MODEL, cluster=cluster(1), steps=STEPS)
    with pytest.raises(UnitRunError, match=r"^unit second: its backward reads parameter second\."):
        carry(job, Carrier(made, values))


def test_a_unit_that_reads_a_parameter_of_another_one_in_a_later_step_alone_is_refused() -> None:
    left: list[torch.Tensor] = []

    def leaving(unit: Linear, value: torch.Tensor) -> torch.Tensor:
        left[:] = [unit.linear.weight]
        return unit.plain(value)

    def taking(unit: Linear, value: torch.Tensor) -> torch.Tensor:
        is_steady = type(left[0]) is torch.Tensor and left[0].is_leaf and not left[0].is_meta
        return unit.plain(value) + (left[0].sum() if is_steady else 0.0)

    module = net(lambda: Linear(leaving), lambda: Linear(taking))
    line, stays = "^unit second: its forward reads what another", {"zero.stage": 0}
    refused(module, STRATEGY.but(stays), line, late=True)
