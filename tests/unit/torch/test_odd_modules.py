"""Modules that do odd things inside blocks and between them, and train as in torch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from odd_modules import RATE, WIDTH, Block, Net, batch, halved, plain_block, row, sgd, with_
from shared_ranks import SharedPools
from torch import Tensor, nn

from zsim.strategy.strategy import Strategy
from zsim_torch.trainer import Trainer


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


@pytest.mark.matrix(9)
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_odd_trains_as_in_torch(name: str, stage: int) -> None:
    assert apart(name, stage) <= 1e-6


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_odd_trains_on_ranks_as_under_ddp(
    pool_of: SharedPools, name: str, stage: int
) -> None:
    for found in pool_of(2).run(apart, name, stage):
        assert found <= 1e-6
