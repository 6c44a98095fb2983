"""Train a module and data of your own by a schedule, on local ranks.

python examples/own_module.py
"""

import torch
from torch import Tensor, distributed, nn

from zsim.runtimes.registry import make_schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch import describe, run_ranks, train

RANKS, STEPS = 2, 60


class Distance(nn.Module):
    """The last unit of a model."""

    def forward(self, guess: Tensor, x: Tensor) -> Tensor:
        """Return the loss, from what came before and the batch."""
        return (guess - torch.sin(3 * x)).square().mean()


def fit() -> tuple[float, ...]:
    """Run on every rank, with an equal module and data of its own."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1), Distance())
    own = torch.Generator().manual_seed(distributed.get_rank())
    batches = [torch.rand(32, 1, generator=own) for _ in range(STEPS)]
    units = ("0", "1", "2", "3")  # what is gathered and freed together: paths of submodules
    strategy = Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(stage=3),
        train=Train(optimizer=Adam(learning_rate=2e-2)),
    )
    zero3 = make_schedule(describe(module, units, batches[0]), strategy)
    return train(module, units, zero3, batches, steps=STEPS).losses


if __name__ == "__main__":
    losses = run_ranks(fit, ranks=RANKS)[0]
    print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in step {STEPS}")
