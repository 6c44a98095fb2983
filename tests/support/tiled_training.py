"""A small transformer trained on ranks: in tiles gathered alone, in blocks, and untiled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from tiny_training import Parameters, Result
from torch import distributed

from zsim.model.architecture import GPT, Transformer
from zsim.model.model import Model
from zsim.model.transformer import transformer as described
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.description import describe
from zsim_torch.module.transformer import transformer
from zsim_torch.train import Option, train

SHAPE = GPT(layers=1, hidden_size=10, attention_heads=2, sequence_length=5, vocab_size=13)
SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class TiledCase:
    """A training of `shape` by a strategy, in units of whole blocks if `by_block`."""

    strategy: Strategy
    shape: Transformer = SHAPE
    by_block: bool = False
    poison: bool = False
    steps: int = 2

    @property
    def untiled(self) -> "TiledCase":
        """The same with every layer whole."""
        return replace(self, strategy=self.strategy.but({"zero.tiles": 1}))

    @property
    def architecture(self) -> Transformer:
        return replace(self.shape, execution=self.strategy.execution)

    def model(self) -> Model:
        precision = self.strategy.train.precision
        if not self.by_block:
            assert isinstance(self.shape, GPT)
            made = replace(self.shape, execution=self.strategy.execution)
            return described(made, micro_batch_size=SEQUENCES, precision=precision)
        module = transformer(self.architecture, dtype=TORCH_DTYPE[precision.optimizer])
        return describe(module, self.units(), self.batch(0, 0, 0), precision=precision)

    @cache  # noqa: B019  # cases are few, and tests ask for what their ranks follow, too
    def schedule(self) -> Schedule:
        strategy = self.strategy.but({"zero.tiles": 1}) if self.by_block else self.strategy
        return make_schedule(self.model(), strategy)

    def units(self) -> tuple[str, ...]:
        module = transformer(self.architecture, seed=None)
        return ("embedding", *module.blocks, "head") if self.by_block else module.units

    def batch(self, step: int, micro_batch: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1 + step + 100 * micro_batch + 10_000 * rank)
        size = (SEQUENCES, self.shape.sequence_length + 1)
        return torch.randint(0, self.shape.vocab_size, size, generator=generator)

    def batches(self, rank: int) -> Iterator[torch.Tensor]:
        for step in range(self.steps):
            for micro_batch in range(self.strategy.train.gradient_accumulation_steps):
                yield self.batch(step, micro_batch, rank)


def trained(case: TiledCase) -> Result:
    """Train on this rank."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    dtype = TORCH_DTYPE[case.strategy.train.precision.optimizer]
    done = train(
        transformer(case.architecture, dtype=dtype),
        case.units(),
        case.schedule(),
        case.batches(rank),
        steps=case.steps,
        option=Option(observe=True, poison=case.poison, write_back=False),
    )
    return Result(done.full_parameters(), done.losses, done.trace, dict(done.scalars))


def all_trained(cases: list[TiledCase]) -> list[Result]:
    """Train case after case in one process group."""
    return [trained(case) for case in cases]


def put_together(tiles: Parameters) -> Parameters:
    """Return parameters of tiles as those of whole layers."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, value in tiles.items():
        block, *rest = name.split(".")
        whole = ".".join((block, *(part for part in rest if not part.isdigit())))
        found.setdefault(whole, []).append(value)
    return {name: torch.cat(parts) for name, parts in found.items()}
