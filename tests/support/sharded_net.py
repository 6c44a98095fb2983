"""The two units that are trained by hand in shards, how, and the same training in one process."""

from dataclasses import dataclass

import torch
from torch import nn

from zsim.dtype import DType
from zsim.schedule.mesh import Axis, Joined, Mesh
from zsim.schedule.operation import FreeMode
from zsim.strategy.optimizer_rule import SGD, Adam, rate_of
from zsim_torch.ground.torch_dtype import TORCH_DTYPE

WIDTH, ROWS, MAXIMUM = 3, 2, 0.05
UNITS = ("body", "loss")


class Body(nn.Module):
    """A layer whose parameters no number of ranks but 3 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(value.to(self.weight.dtype) @ self.weight + self.bias)


class Loss(Body):
    """The same, added up."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value).square().sum()


class Net(nn.Module):
    """The whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.loss = Body(), Loss()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.loss(self.body(batch))
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """How it is trained.

    `inner` splits the data axis in two; with `secondary` what was gathered is kept in shards along
    the inner part and gathered there for backward. With `together` both units are reduced as one.
    With `windows` each parameter of a unit has an update of its own.
    With `copies` replicas see the same data, layouts say so, and all ranks sum the norm.
    """

    data: int = 2
    replicate: int = 1
    inner: int | None = None
    master: DType = DType.FP32
    parameter: DType = DType.FP32
    reduced: DType = DType.FP32
    average: bool = False
    in_place: bool = False
    windows: bool = False
    secondary: bool = False
    together: bool = False
    copies: bool = False
    free: FreeMode = FreeMode.WAITED
    clip: bool = False
    adam: bool = False
    steps: int = 3
    poison: bool = False

    @property
    def readers(self) -> int:
        """Ranks that see different data."""
        return self.data * (1 if self.copies else self.replicate)

    @property
    def rule(self) -> SGD | Adam:
        """What updates."""
        return Adam(learning_rate=0.01, epsilon=1e-5) if self.adam else SGD(learning_rate=0.1)

    def mesh(self) -> Mesh:
        """replicate x data, or replicate x outer x inner."""
        axes = [Axis(name="replicate", size=self.replicate), Axis(name="data", size=self.data)]
        if self.inner is None:
            return Mesh(axes=tuple(axes))
        axes[1:] = [
            Axis(name="outer", size=self.data // self.inner),
            Axis(name="inner", size=self.inner),
        ]
        return Mesh(axes=tuple(axes), joined=(Joined(name="data", axes=("outer", "inner")),))


def batch(step: int, reader: int) -> torch.Tensor:
    """What one of the ranks sees."""
    generator = torch.Generator().manual_seed(step + 100 * reader)
    return torch.randint(0, 3, (ROWS, WIDTH), generator=generator)


def by_plain_loop(flow: Flow) -> dict[str, torch.Tensor]:
    """The same in one process."""
    readers = range(flow.readers)
    return plain_loop(
        flow, [[batch(step, reader) for reader in readers] for step in range(flow.steps)]
    )


def plain_loop(flow: Flow, steps: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One process: masters, a cast copy of them for each batch of a step, gradients averaged."""
    net = Net()
    masters = {
        name: value.detach().to(TORCH_DTYPE[flow.master]).requires_grad_()
        for name, value in net.named_parameters()
    }
    rule = flow.rule
    optimizer: torch.optim.Optimizer = torch.optim.SGD(masters.values(), lr=rate_of(rule, {}))
    if isinstance(rule, Adam):
        optimizer = torch.optim.AdamW(
            masters.values(), lr=rate_of(rule, {}), eps=rule.epsilon, weight_decay=0.0
        )
    for batches in steps:
        total = {name: torch.zeros_like(master) for name, master in masters.items()}
        for each in batches:
            cast = {
                name: master.detach().to(TORCH_DTYPE[flow.parameter]).requires_grad_()
                for name, master in masters.items()
            }
            loss = torch.func.functional_call(net, cast, (each,))
            gradients = torch.autograd.grad(loss, list(cast.values()))
            for name, gradient in zip(cast, gradients, strict=True):
                total[name] += gradient.to(TORCH_DTYPE[flow.reduced]) / len(batches)
        for name, master in masters.items():
            master.grad = total[name]
        if flow.clip:
            nn.utils.clip_grad_norm_(masters.values(), MAXIMUM)
        optimizer.step()
    return {name: value.detach() for name, value in masters.items()}
