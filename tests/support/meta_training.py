"""Trainings of a module that is built on "meta", on the ranks of a process group."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from live_storages import LiveStorages
from torch import distributed, nn
from torch.nn import functional

from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.initial_values import InitialValues
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

VOCABULARY, TOKENS = 16, 4
Parameters = dict[str, torch.Tensor]


class Layer(nn.Module):
    """A block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 2 * width)
        self.fall = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.fall(torch.tanh(self.rise(self.norm(hidden))))
        return hidden + made


class Tied(nn.Module):
    """Blocks between a table and a head with the same weight; statistics are buffers."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.spread = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.table(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(self.spread(hidden)), batch)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def batch_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


@dataclass(frozen=True, slots=True)
class Start:
    """A training: its stage, where its values come from (None: the module's own), its units."""

    stage: int
    initial: InitialValues | None
    chosen: bool = False
    steps: int = 2


@dataclass(slots=True)
class Begun:
    """Findings of a rank: parameters at first and in the end, losses, and buffers."""

    first: Parameters
    last: Parameters
    losses: list[float]
    buffers: Parameters


def strategy_of(stage: int, *, adam: bool = True) -> Strategy:
    return Strategy(
        parallel=Parallel(data=distributed.get_world_size() if distributed.is_initialized() else 1),
        zero=Zero(stage=stage, bucket_elements=200),
        train=Train(optimizer=Adam(learning_rate=0.01) if adam else SGD(learning_rate=0.01)),
    )


def begin(start: Start) -> Begun:
    """Train on this rank."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    module = Tied() if start.initial is None else on_meta(Tied)
    option = Option(initial=start.initial, poison=True)
    first = batch_of(rank)
    with Trainer(module, strategy_of(start.stage), batch=first, option=option) as trainer:
        before = trainer.full_parameters()
        losses = [float(trainer.step(first)) for _ in range(start.steps)]
        after = trainer.full_parameters()
    return Begun(before, after, losses, dict(module.named_buffers()))


def begin_all(starts: list[Start]) -> list[Begun]:
    """Train one after another in one process group."""
    return [begin(start) for start in starts]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a rank: the most that lived while a training began, and its state afterwards."""

    peak: int
    state: int
    whole: int
    largest_unit: int


def bytes_at_start(width: int, layers: int, stage: int, initial: InitialValues) -> Held:
    """Begin a training of a deep module on this rank, and look at every storage."""
    module = on_meta(lambda: Tied(width, layers))
    sizes = {name: each.numel() * each.element_size() for name, each in module.named_parameters()}
    units: dict[str, int] = {}
    for name, size in sizes.items():
        unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        units[unit] = units.get(unit, 0) + size
    with LiveStorages() as live:
        strategy = strategy_of(stage, adam=False)
        trainer = Trainer(module, strategy, batch=batch_of(0), option=Option(initial=initial))
        peak = live.peak
    program = trainer.run.program
    state = sum(program.by_name[name].size_bytes for name in program.persistent)
    trainer.finish()
    return Held(peak, state, sum(sizes.values()), max(units.values()))


SAFETENSORS = {torch.float32: "F32", torch.int64: "I64"}


def write_safetensors(path: Path, values: Parameters) -> None:
    """Write a file as the README of safetensors has the format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, value in values.items():
        data = value.detach().contiguous().numpy().tobytes()
        header[name] = {
            "dtype": SAFETENSORS[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    said = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(said)) + said + body)
