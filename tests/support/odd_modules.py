"""Small modules with blocks, of which a test changes what they do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train

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
