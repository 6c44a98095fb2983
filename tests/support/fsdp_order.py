"""Models, and the collectives that our schedules and PyTorch's FSDP issue for them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from fully_sharded import Collective, recorded
from torch import nn
from torch.nn import functional

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllGather, AllReduce, ReduceScatter
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.description import describe
from zsim_torch.module.transformer import transformer


def issued(made: Schedule, stage: int | None = None) -> Iterator[Collective]:
    """Collectives of the step over the data axes, in the order of the host; of a `stage`."""
    (program,) = made.programs if stage is None else made.programs[stage : stage + 1]
    sizes = {group.name: group.size(made.mesh) for group in made.groups}

    def form(kind: str, operation: AllGather | ReduceScatter | AllReduce, whole: int) -> Collective:
        dtype = str(TORCH_DTYPE[operation.wire])
        return Collective(kind, sizes[operation.group], whole, dtype)

    for operation in program.step:
        match operation:
            case AllGather(target=view):
                yield form("all_gather", operation, view.size)
            case ReduceScatter(source=view):
                yield form("reduce_scatter", operation, view.size)
            case AllReduce(source=view) if view.size > 1:
                yield form("all_reduce", operation, view.size)
            case _:
                pass


class Twice(nn.Module):
    """One parameter used twice, another one shorter than most worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(3, 1, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(torch.tanh(self.linear(hidden)))
        return made * self.scale.flatten()


class Awkward(nn.Module):
    """Tied weights at both ends; a block whose input has no gradient; nothing divides anything."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = Twice()
        self.middle = Twice()
        self.more = nn.Linear(6, 5, bias=False)
        self.back = nn.Linear(5, 6)
        self.end = Loss(self.more.weight)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.back(self.more(self.middle(self.start(batch))))
        loss: torch.Tensor = self.end(hidden)
        return loss


class Loss(nn.Module):
    """Reads a weight of another unit."""

    def __init__(self, tied: torch.Tensor) -> None:
        super().__init__()
        assert isinstance(tied, nn.Parameter)
        self.weight = tied
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weight, self.bias).square().mean()


SHAPE = GPT(
    layers=4,
    hidden_size=8,
    attention_heads=2,
    sequence_length=4,
    vocab_size=19,
    tied_embeddings=False,
)


def both(
    module: nn.Module,
    units: Sequence[str],
    blocks: Sequence[str],
    batch: torch.Tensor,
    strategy: Strategy,
) -> tuple[list[Collective], list[Collective]]:
    """What our schedule and what PyTorch issues."""
    options = strategy.zero.emulate
    assert isinstance(options, FSDP1 | FSDP2)
    reads = {"end": ("back",)}  # without the batch, which the last unit reads else
    described = describe(module, units, batch, precision=strategy.train.precision, reads=reads)
    model = replace(
        described,
        units=tuple(replace(unit, checkpoint=unit.name in blocks) for unit in described.units),
    )
    theirs = recorded(module, blocks, batch, strategy=strategy, options=options)
    return list(issued(make_schedule(model, strategy))), theirs


def of_gpt(strategy: Strategy) -> tuple[list[Collective], list[Collective]]:
    """Both for a GPT of four blocks."""
    module = transformer(SHAPE)
    batch = torch.randint(0, SHAPE.vocab_size, (1, SHAPE.sequence_length + 1))
    blocks = [name for name in module.units if name.startswith("block")]
    return both(module, module.units, blocks, batch, strategy)


def of_awkward(strategy: Strategy) -> tuple[list[Collective], list[Collective]]:
    """Both for a model in which nothing divides anything."""
    units, blocks = ("start", "middle", "more", "back", "end"), ("start", "middle", "back")
    batch = torch.ones(2, 6, dtype=TORCH_DTYPE[strategy.train.precision.compute])
    return both(Awkward(), units, blocks, batch, strategy)


def of_frozen_gpt(
    patterns: tuple[str, ...], strategy: Strategy
) -> tuple[list[Collective], list[Collective]]:
    """Both for a GPT of four blocks, whose parameters with such names are frozen."""
    options = strategy.zero.emulate
    assert isinstance(options, FSDP2)
    module = transformer(SHAPE)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, each) for each in patterns))
    batch = torch.randint(0, SHAPE.vocab_size, (1, SHAPE.sequence_length + 1))
    blocks = [name for name in module.units if name.startswith("block")]
    theirs = recorded(module, blocks, batch, strategy=strategy, options=options)
    shape = replace(SHAPE, frozen=patterns)
    model = gpt(shape, micro_batch_size=1, precision=strategy.train.precision)
    return list(issued(make_schedule(model, strategy))), theirs
