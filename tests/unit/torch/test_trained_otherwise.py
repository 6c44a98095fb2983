"""Modules and optimizers that a schedule would train otherwise than torch: refused in one line."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from zsim.backend.backend import RefusedError
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.run_option import Option
from zsim_torch.supervise.ranks import run_ranks
from zsim_torch.trainer import Trainer

WIDTH, RATE = 4, 0.1

Forward = Callable[["Block", Tensor], Tensor]


def plain_block(block: "Block", x: Tensor) -> Tensor:
    made: Tensor = x + torch.tanh(block.inner(x))
    return made


class Block(nn.Module):
    """A block that does what a test says."""

    def __init__(self, within: Forward = plain_block) -> None:
        super().__init__()
        self.inner: Any = nn.Linear(WIDTH, WIDTH)
        self.within = within
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.within(self, x)


class Net(nn.Module):
    """Two blocks, one linear layer before and one after them."""

    def __init__(self, within: Forward = plain_block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(Block(within) for _ in range(2))
        self.between: Callable[[Net, Tensor], Tensor] = lambda net, x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.last(self.between(self, x)).square().mean()
        return made


class Mean(nn.Module):
    """A loss without targets."""

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return x.square().mean()


def row(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, WIDTH), Mean())


def batch(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def sgd(stage: int) -> Strategy:
    return Strategy(zero=Zero(stage=stage), train=Train(optimizer=SGD(learning_rate=RATE)))


def with_(module: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(module)
    return module


def halved(gradient: Tensor) -> Tensor:
    return gradient / 2


def clamps(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.inner.weight.clamp_(-0.1, 0.1)
    return plain_block(block, x)


def clamps_data(block: Block, x: Tensor) -> Tensor:
    block.inner.weight.data.clamp_(-0.1, 0.1)
    return plain_block(block, x)


def doubles_input(block: Block, x: Tensor) -> Tensor:
    return plain_block(block, x.mul_(2))


def hooks_input(block: Block, x: Tensor) -> Tensor:
    x.register_hook(halved)  # type: ignore[no-untyped-call]
    return plain_block(block, x)


def hooks_output(net: Net, x: Tensor) -> Tensor:
    x.register_hook(halved)  # type: ignore[no-untyped-call]
    return x


def complex_scale(block: Block, x: Tensor) -> Tensor:
    return plain_block(block, (x * block.scale).abs())


def freezes(net: Net, x: Tensor) -> Tensor:
    net.first.weight.requires_grad = False
    return x


def keeps_mean(net: Net, x: Tensor) -> Tensor:
    net.blocks[0].mean = x.mean(0)
    return x


def appends(block: Block, given: Any) -> Tensor:  # noqa: ANN401  (a list of tensors)
    given.append(plain_block(block, given[-1]))
    made: Tensor = given[-1]
    return made


class Appending(Net):
    """Its blocks are given a list, and change it."""

    def __init__(self) -> None:
        super().__init__(appends)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for block in self.blocks:
            block(found)
        return torch.stack(found).mean()


class Counting(Net):
    """It counts its calls, and its losses are small."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * 1e-4 * self.calls


class Overwriting(Net):
    """It changes its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


MAKE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook of a parameter": (
        lambda: with_(Net(), lambda net: net.first.weight.register_hook(halved)),
        r"parameter first\.weight: it has a hook for its gradient",
    ),
    "a hook after a gradient was added": (
        lambda: with_(
            Net(),
            lambda net: net.first.weight.register_post_accumulate_grad_hook(lambda each: None),
        ),
        r"parameter first\.weight: it has a hook for its gradient",
    ),
    "a backward hook of the whole": (
        lambda: with_(
            Net(), lambda net: net.register_full_backward_pre_hook(lambda _, given: given)
        ),
        "module: it has a backward hook, which is called inside units alone",
    ),
    "a backward hook between blocks": (
        lambda: with_(
            Net(), lambda net: net.last.register_full_backward_hook(lambda _, taken, given: None)
        ),
        "module last: it has a backward hook",
    ),
    "a forward hook of a sequence": (
        lambda: with_(row(), lambda net: net.register_forward_hook(lambda _, given, made: made)),
        "module: it has a forward hook",
    ),
    "a complex parameter": (
        lambda: with_(
            Net(complex_scale),
            lambda net: net.blocks[0].register_parameter(
                "scale", nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
            ),
        ),
        r"parameter blocks\.0\.scale: complex64 must be a format of real floats",
    ),
    "whole numbers as a parameter": (
        lambda: with_(
            Net(),
            lambda net: net.register_parameter(
                "number", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
            ),
        ),
        r"parameter number: int64 must be a format of real floats; keep it as a buffer",
    ),
    "a lazy parameter": (
        lambda: row(nn.LazyLinear(WIDTH)),
        r"parameter 1\.weight: it has no shape yet \(a lazy module\)",
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), Mean()),
        "module 0: its gradients are sparse",
    ),
    "nothing to train": (
        lambda: Net().requires_grad_(requires_grad=False),
        "module: it has no parameter that is trained",
    ),
    "a parameter that is written": (
        lambda: Net(clamps),
        r"unit blocks\.0: its forward writes parameter inner\.weight in place",
    ),
    "a parameter that is written past autograd": (
        lambda: Net(clamps_data),
        r"unit blocks\.0: its forward writes parameter inner\.weight in place",
    ),
    "a parameter that a unit of a row writes": (
        lambda: row(Block(clamps)),
        r"unit 1: its forward writes parameter 1\.inner\.weight in place",
    ),
    "an input that is written": (
        lambda: Net(doubles_input),
        r"unit blocks\.0: its forward writes what it is called with in place",
    ),
    "an input that a unit of a row writes": (
        lambda: row(nn.ReLU(inplace=True)),
        "unit 1: its forward writes what it is called with in place",
    ),
    "a small loss that counts calls": (Counting, "module: run by units it makes a loss of"),
    "a batch that is written": (Overwriting, "module: its forward writes its batch in place"),
    "a hook on an input": (
        lambda: Net(hooks_input),
        r"unit blocks\.0: its forward puts a hook on what it is called with",
    ),
    "a hook on what a block returned": (
        lambda: with_(Net(), lambda net: setattr(net, "between", hooks_output)),
        "module: its forward puts a hook on a parameter, or on what a block returned",
    ),
    "a list that a block changes": (
        Appending,
        r"unit blocks\.0: it changes a list or dict that it is called with",
    ),
    "requires_grad set between blocks": (
        lambda: with_(Net(), lambda net: setattr(net, "between", freezes)),
        r"module: its forward sets requires_grad of first\.weight",
    ),
    "a buffer made of activations between blocks": (
        lambda: with_(Net(), lambda net: setattr(net, "between", keeps_mean)),
        r"module: its forward makes buffer blocks\.0\.mean of what depends on parameters",
    ),
    "a module that is compiled as a whole": (
        lambda: cast("nn.Module", torch.compile(Net(), backend="eager")),
        r"module: torch\.compile has wrapped it whole",
    ),
    "another format than the strategy's": (
        lambda: Net().double(),
        r"module: its forward fails in fp32, .* has torch\.float64 \(train\.precision\?\)",
    ),
}


@pytest.mark.parametrize("name", MAKE)
def test_what_would_be_trained_otherwise_is_refused_in_one_line(name: str) -> None:
    make, line = MAKE[name]
    module = make()
    given = batch(0).double() if "format" in name and "whole" not in name else batch(0)
    with pytest.raises((RefusedError, ModuleUnitError)) as caught:
        Trainer(module, sgd(3), batch=given)
    assert re.match(line, str(caught.value)), str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "source", "line"),
    [
        (len, sgd(3), "module: a builtin_function_or_method must be a torch.nn.Module"),
        (row(), {"stage": 3}, "source: a dict must be a Schedule, a Strategy, or a scenario"),
    ],
)
def test_arguments_of_another_kind_are_told_in_one_line(
    module: Any,  # noqa: ANN401
    source: Any,  # noqa: ANN401
    line: str,
) -> None:
    with pytest.raises(RefusedError, match=re.escape(line)):
        Trainer(module, source, batch=batch(0))


def test_an_optimizer_that_has_trained_is_refused_unless_it_may_begin_anew() -> None:
    module, given = Net(), batch(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    module(given).backward()
    optimizer.step()
    with pytest.raises(RefusedError, match=r"optimizer: it has .* of an earlier training"):
        Trainer(module, sgd(3), batch=given, optimizer=optimizer)
    again = Trainer(module, sgd(3), batch=given, optimizer=optimizer, option=Option(restart=True))
    again.step(given)
    again.finish()


def follows(block: Block, x: Tensor) -> Tensor:
    """Put another tensor in the place of a buffer, and read it."""
    block.mean = 0.9 * block.mean + x.detach().mean(0)
    return plain_block(block, x) + block.mean


def hooked(block: Block, x: Tensor) -> Tensor:
    made = plain_block(block, x)
    made.register_hook(halved)  # type: ignore[no-untyped-call]
    return made


def hooked_between(net: Net, x: Tensor) -> Tensor:
    made = x * 1
    made.register_hook(halved)  # type: ignore[no-untyped-call]
    return made


def differentiates(block: Block, x: Tensor) -> Tensor:
    with torch.enable_grad():
        inner = block.inner(x)
        (slope,) = torch.autograd.grad(torch.tanh(inner).sum(), inner, create_graph=True)
    made: Tensor = x + slope
    return made


def infers(block: Block, x: Tensor) -> Tensor:
    with torch.inference_mode():
        shift = torch.ones(WIDTH) * 2
        shift = shift + 1
    return plain_block(block, x + shift.clone())


def regularized(net: Net, x: Tensor) -> Tensor:
    """Read parameters of blocks between them."""
    return x + 0.1 * torch.stack([each.square().sum() for each in net.parameters()]).sum()


class Placing(Net):
    """Its blocks return masks, and numbers of 32 bits, beside values."""

    def __init__(self) -> None:
        super().__init__(places)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x, mask, place = block(x)
            x = x * mask + place[:, None]
        made: Tensor = self.last(x).square().mean()
        return made


def places(block: Block, x: Tensor) -> Any:  # noqa: ANN401  (three tensors)
    made = plain_block(block, x)
    return made, made > 0, made.argmax(-1).int()


class Paired(nn.Module):
    """Blocks in a dict, a scale beside them, and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.pair: Any = nn.ModuleDict({"one": Block(), "other": Block()})
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = (self.pair["other"](self.pair["one"](x)) * self.scale).square().mean()
        return made


WORKS: dict[str, Callable[[], nn.Module]] = {
    "a buffer that is another tensor after each forward": lambda: Net(follows),
    "the same in a row of units": lambda: row(Block(follows), Block(follows)),
    "hooks of tensors in blocks": lambda: Net(hooked),
    "hooks of tensors between blocks": lambda: with_(
        Net(), lambda net: setattr(net, "between", hooked_between)
    ),
    "a gradient taken in a block": lambda: Net(differentiates),
    "inference mode in a block": lambda: Net(infers),
    "parameters of blocks that are read between them": lambda: with_(
        Net(), lambda net: setattr(net, "between", regularized)
    ),
    "masks and numbers that cross": Placing,
    "blocks in a dict": Paired,
}


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses of a training, and what the module has after it."""

    losses: list[float]
    state: dict[str, Tensor]


def by_torch(module: nn.Module, ranks: int, rank: int) -> Trained:
    """Train as DDP does, in one process: means of gradients, buffers of rank 0."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses: list[float] = []
    for step in range(3):
        before = copy.deepcopy(dict(module.named_buffers()))
        kept = before
        for each in range(ranks):
            module.load_state_dict(before, strict=False)
            given = batch(ranks * step + each)
            loss = module(given, given) if isinstance(module, _Row) else module(given)
            (loss / ranks).backward()
            losses += [float(loss.detach())] if each == rank else []
            kept = kept if each else copy.deepcopy(dict(module.named_buffers()))
        module.load_state_dict(kept, strict=False)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, module.state_dict())


class _Row(nn.Module):
    """A sequence whose last member is given the batch, too."""

    def __init__(self, members: nn.Sequential) -> None:
        super().__init__()
        self.members = members

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        *others, last = self.members
        for each in others:
            x = each(x)
        made: Tensor = last(x, batch)
        return made


def apart(name: str, stage: int) -> float:
    """Return by how much a training by zsim differs from torch's at most, on this rank."""
    distributed = torch.distributed
    joined = distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
    torch.manual_seed(0)
    module = WORKS[name]()
    torch.manual_seed(0)
    plain = WORKS[name]()
    with Trainer(module, of_ranks(stage, ranks), batch=batch(rank)) as trainer:
        losses = [float(trainer.step(batch(ranks * step + rank))) for step in range(3)]
    whole = _Row(plain) if isinstance(plain, nn.Sequential) else plain
    expected = by_torch(whole, ranks, rank)
    pairs = zip(module.state_dict().values(), expected.state.values(), strict=True)
    differences = [float((one - other).abs().max()) for one, other in pairs]
    return max(
        *differences,
        *(abs(one - other) for one, other in zip(losses, expected.losses, strict=True)),
    )


def of_ranks(stage: int, ranks: int) -> Strategy:
    return sgd(stage).but({"parallel.data": ranks})


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_odd_trains_as_in_torch(name: str, stage: int) -> None:
    assert apart(name, stage) <= 1e-6


def all_apart() -> list[float]:
    return [apart(name, stage) for name in WORKS for stage in (1, 2, 3)]


def test_what_is_odd_trains_on_ranks_as_under_ddp() -> None:
    for found in run_ranks(all_apart, ranks=2):
        assert max(found) <= 1e-6
