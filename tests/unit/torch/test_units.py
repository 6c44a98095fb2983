"""Modules of a user, with what makes autograd hard: each trains as a plain loop does."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.model.kernel import KernelKind
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import Keep
from zsim_torch.module.description import describe
from zsim_torch.module.unit import ModuleUnitError, UnitRunError
from zsim_torch.train import Option, Trained, train

SIZE = 4
STEPS = 3


class Unit(nn.Module):
    """A linear layer, and what the test adds to it."""

    def __init__(self, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.add = add

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.add(value, self.linear(value))


class Head(nn.Module):
    def forward(self, value: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return value.square().mean()


class Net(nn.Module):
    """first, second, head; all in fp64."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head = first, second, Head()
        self.double()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.second(self.first(batch)))
        return loss


def plain(_: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return made.tanh()


def net(
    first: Callable[[], nn.Module] = lambda: Unit(plain),
    second: Callable[[], nn.Module] = lambda: Unit(plain),
) -> Net:
    torch.manual_seed(3)
    return Net(first(), second())


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(2, SIZE, generator=generator, dtype=torch.float64) for _ in range(2 * STEPS)]


STRATEGY = Strategy(
    zero=Zero(stage=3, bucket_elements=10),
    train=Train(
        precision=Precision.FP64, optimizer=SGD(learning_rate=0.1), gradient_accumulation_steps=2
    ),
)
UNITS = ("first", "second", "head")


def trained(module: Net, strategy: Strategy = STRATEGY, *, poison: bool = True) -> Trained:
    model = describe(module, UNITS, batches()[0], precision=Precision.FP64)
    torch.manual_seed(11)
    return train(
        module,
        UNITS,
        make_schedule(model, strategy),
        batches(),
        steps=STEPS,
        option=Option(observe=True, poison=poison),
    )


class Breaking:
    """Fails at its second call: in the second micro-batch of the first step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("no more")
        return plain(value, made)


def test_a_module_has_the_parameters_that_it_came_with_when_its_run_raises() -> None:
    module = net(second=lambda: Unit(Breaking()))
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    with pytest.raises(ArithmeticError, match="no more"):
        trained(module)
    after = dict(module.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def in_a_plain_loop(module: Net) -> Net:
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = batches()
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in data[2 * step : 2 * step + 2]:
            (module(batch) / 2).backward()
        optimizer.step()
    return module


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, left), (_, right) in zip(
        one.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-14), name


STRATEGIES = (
    STRATEGY,
    STRATEGY.but({"activations.checkpointing": Checkpointing.FULL}),
    STRATEGY.but({"zero.keep_after_forward": Keep.EVERYTHING}),
    STRATEGY.but({"zero.stage": 1}),
)


class Dropping(Unit):
    def __init__(self) -> None:
        super().__init__(plain)
        self.drop = nn.Dropout(0.5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.drop(super().forward(value))
        return made


class Idle(Unit):
    """A parameter that no output depends on, and one without elements."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.empty(0))


class Bilinear(nn.Module):
    """Weights that are saved transposed, in parts and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * SIZE, SIZE))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        up, down = self.weight.chunk(2)
        return ((value @ up.T) * (value @ down)) @ self.weight[1 : 1 + SIZE].T.contiguous()


class Functional(nn.Module):
    """No parameters at all."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.exp()


class Passing(nn.Module):
    """Returns what it is given: output and input, and their gradients, share a storage."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


@pytest.mark.matrix(24)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "first",
    [
        lambda: Unit(plain),
        lambda: Unit(lambda value, made: value + made),
        lambda: Unit(lambda _, made: made.relu_()),
        Dropping,
        Idle,
        Bilinear,
        Functional,
        Passing,
    ],
    ids=["plain", "residual", "in place", "dropout", "idle", "bilinear", "functional", "passing"],
)
def test_units_train_as_in_a_plain_loop(first: Callable[[], nn.Module], strategy: Strategy) -> None:
    def other() -> nn.Module:
        return Unit(plain)

    for one, two in ((first, other), (other, first)):
        module = net(one, two)
        trained(module, strategy)
        same(module, in_a_plain_loop(net(one, two)))


def tied() -> Net:
    module = net()
    second, first = module.get_submodule("second.linear"), module.get_submodule("first.linear")
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    second.weight = first.weight
    return module


@pytest.mark.matrix(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_of_two_units_gets_the_sum_of_its_gradients(strategy: Strategy) -> None:
    module = tied()
    trained(module, strategy)
    same(module, in_a_plain_loop(tied()))


class Skip(Net):
    """`head` reads what `first` made as well: two gradients of one value."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        made = self.first(batch)
        loss: torch.Tensor = self.head(self.second(made) + made)
        return loss


class SumHead(Head):
    def forward(self, value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return super().forward(value + others[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_value_that_two_units_read_gets_the_sum_of_both_gradients(strategy: Strategy) -> None:
    def skip() -> Skip:
        torch.manual_seed(3)
        return Skip(Unit(plain), Unit(plain))

    module, units = skip(), (("first"), ("second"), ("head", SumHead()))
    model = describe(
        module,
        units,
        batches()[0],
        precision=Precision.FP64,
        reads={"head": ("second", "first")},
    )
    train(module, units, make_schedule(model, strategy), batches(), steps=STEPS)
    same(module, in_a_plain_loop(skip()))


def test_gradients_in_one_storage_are_listed_as_shared() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(SIZE))
            self.two = nn.Parameter(torch.ones(SIZE))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value.tanh() * (self.one + self.two)

    module = net(Sum, Sum)
    result = trained(module, STRATEGY.but({"zero.bucket_elements": 100}), poison=False)
    same(module, in_a_plain_loop(net(Sum, Sum)))
    observed = dict(result.trace.observed)
    # The gradients of `one` and `two` are one storage of 4 elements of 8 bytes.
    assert observed["shared_bytes_peak/gradient"] == 32
    short = observed["booked_bytes_peak/state"] - observed["live_bytes_peak/state"]
    assert 0 <= short <= observed["shared_bytes_peak/gradient"]


@pytest.mark.one_commit_in(6)
def test_batch_norm_is_refused_under_checkpointing_and_runs_without() -> None:
    def norm() -> nn.Module:
        return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))

    module = net(norm, norm)
    trained(module)
    with pytest.raises(RefusedError, match="unit first: a batch norm changes its buffers"):
        trained(net(norm, norm), STRATEGY.but({"activations.checkpointing": Checkpointing.FULL}))


def test_a_buffer_that_changes_under_checkpointing_is_an_error() -> None:
    class Counting(Unit):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__(plain)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(value) * self.count

    with pytest.raises(UnitRunError, match="unit first: its forward changes a buffer"):
        trained(net(Counting), STRATEGY.but({"activations.checkpointing": Checkpointing.FULL}))


def test_autocast_is_refused_outside_and_found_inside() -> None:
    class Casting(Unit):
        def __init__(self) -> None:
            super().__init__(plain)
            self.enabled = False

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=self.enabled):
                return super().forward(value)

    first = Casting()
    module = net(lambda: first)
    model = describe(module, UNITS, batches()[0], precision=Precision.FP64)
    first.enabled = True
    with pytest.raises(UnitRunError, match="unit first: autocast inside the unit"):
        train(module, UNITS, make_schedule(model, STRATEGY), batches())
    with torch.autocast("cpu"), pytest.raises(RefusedError, match="autocast"):
        trained(net())


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_later_forward_changes_in_place_is_found_too(stage: int) -> None:
    """Parameters of stage 0 stay where they are: autograd keeps them itself after the first."""

    class Later:
        calls = 0

        def __call__(self, _: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return made.exp().mul_(2) if self.calls > 3 else made.exp() * 2

    module = net(lambda: Unit(Later()))
    with pytest.raises(UnitRunError, match="unit first: a tensor that its backward needs"):
        trained(module, STRATEGY.but({"zero.stage": stage}))


def test_a_tensor_that_backward_needs_may_not_change_in_place() -> None:
    module = net(lambda: Unit(lambda _, made: made.exp().mul_(2)))
    with pytest.raises(UnitRunError, match="unit first: a tensor that its backward needs"):
        trained(module)


def test_parameters_of_another_size_are_refused() -> None:
    model = describe(net(), UNITS, batches()[0], precision=Precision.FP64)
    module = net(lambda: nn.Linear(SIZE, SIZE, bias=False))
    with pytest.raises(RefusedError, match="unit first"):
        train(module, UNITS, make_schedule(model, STRATEGY), batches())


def test_units_have_to_make_up_the_module() -> None:
    with pytest.raises(ModuleUnitError, match=r"parameter first\.linear\.weight: it is in no unit"):
        describe(net(), ("second", "head"), batches()[0])
    with pytest.raises(ModuleUnitError, match="unit third: the module has no such submodule"):
        describe(net(), ("first", "third"), batches()[0])
    with pytest.raises(ModuleUnitError, match="unit first: the name is used twice"):
        describe(net(), ("first", "first"), batches()[0])


def test_batches_that_end_too_early_are_an_error_of_the_run() -> None:
    module = net()
    model = describe(module, UNITS, batches()[0], precision=Precision.FP64)
    with pytest.raises(RuntimeError, match="batches: they ended before the last step"):
        train(module, UNITS, make_schedule(model, STRATEGY), batches()[:3], steps=2)


def test_a_description_has_sizes_names_and_costs() -> None:
    model = describe(net(), UNITS, batches()[0], precision=Precision.FP64, name="net")
    first, second, head = model.units
    assert [p.name for p in first.parameters] == ["first.linear.weight", "first.linear.bias"]
    assert first.segments[0].inputs == ("batch",)
    assert head.segments[0].inputs == ("second", "batch")
    assert model.loss.elements == 1
    # tanh keeps its result: 2 x 4 numbers of 8 bytes; input and weight are not counted again.
    assert second.segments[0].saved_bytes == 64
    # The product of [2, 4] and [4, 4]: 2 x 2 x 4 x 4 FLOPs.
    (kernel,) = second.segments[0].forward
    assert (kernel.kind, kernel.flops) == (KernelKind.MATMUL, 64)
    assert model.parameter_count == 2 * (SIZE * SIZE + SIZE)
