"""Train a module on two ranks by a schedule with Adagrad, and by torch's own loop."""

import sys
from importlib import import_module

import torch
from torch import distributed, nn

from zsim.strategy.optimizer_rule import rules
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.trainer import Trainer

RANKS, STEPS = 2, 4
CONSTANTS = {"lr_decay": 0.1, "weight_decay": 0.01}


class Loss(nn.Module):
    """The last unit."""

    def forward(self, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Return the mean square."""
        return value.square().mean()


def net() -> nn.Sequential:
    """Return the module; its shapes do not divide by the number of ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), Loss()).double()


def batch(step: int, rank: int) -> torch.Tensor:
    """Return the micro-batch of a rank in a step."""
    generator = torch.Generator().manual_seed(STEPS * rank + step)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def by_schedule(stage: int, *, from_torch: bool) -> dict[str, torch.Tensor]:
    """Return the parameters after training in a stage, with the rule or with torch's optimizer."""
    module, rank = net(), distributed.get_rank()
    strategy = Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(stage=stage),
        train=Train(
            precision=Precision.FP64,
            optimizer=rules()["adagrad"](learning_rate=0.05, **CONSTANTS),
        ),
    )
    optimizer = theirs(module) if from_torch else None
    with Trainer(module, strategy, batch=batch(0, rank), optimizer=optimizer) as trainer:
        for step in range(STEPS):
            trainer.step(batch(step, rank))
        return trainer.full_parameters()


def theirs(module: nn.Module) -> torch.optim.Adagrad:
    """Return torch's optimizer."""
    return torch.optim.Adagrad(module.parameters(), lr=0.05, **CONSTANTS)  # type: ignore[arg-type]  # floats


def by_torch() -> dict[str, torch.Tensor]:
    """Return the parameters after torch's own loop over the batches of all ranks."""
    module = net()
    optimizer = theirs(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            loss = module[3](module[:3](batch(step, rank)), batch(step, rank)) / RANKS
            loss.backward()
        optimizer.step()
    return module.state_dict()


def main() -> None:
    """Print the largest difference of a parameter for each case."""
    wanted = by_torch()
    pool = RankPool(RANKS)
    try:
        for stage, from_torch in ((1, False), (3, True)):
            for found in pool.run(run, stage, from_torch):
                apart = [float((found[name] - wanted[name]).abs().max()) for name in wanted]
                sys.stdout.write(f"{stage} {max(apart)}\n")
    finally:
        pool.close()


def run(stage: int, from_torch: bool) -> dict[str, torch.Tensor]:
    """Run `by_schedule` on a rank."""
    return by_schedule(stage, from_torch=from_torch)


if __name__ == "__main__":
    import_module("trained").main()  # ranks find `run` by this name
