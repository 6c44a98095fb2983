"""Train a small Llama on a text file: ZeRO-3 on local ranks, checkpoints, a learning rate schedule.

python examples/train_llama.py TEXT --steps 200 --folder checkpoint

Started again with more steps, or after a crash, it goes on from the checkpoint in the folder.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch import Trainer, run_ranks

RANKS, BATCH, LENGTH, WARMUP, EVERY = 2, 8, 64, 20, 10
WIDTH, HEADS, LAYERS, BYTES = 64, 4, 2, 256


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the position (Su et al. 2021)."""
    half = x.shape[-1] // 2
    speed = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    one, two = x.chunk(2, -1)
    turned = (one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos())
    return torch.cat(turned, -1).to(x.dtype)


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False)
            for shape in ((WIDTH, 3 * WIDTH), (WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what both make."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        made: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return made


class Embedding(nn.Module):
    """Bytes to features; the last byte of each row is a target alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(BYTES, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        """Look bytes up."""
        made: Tensor = self.table(batch[:, :-1])
        return made


class Head(nn.Module):
    """The loss: cross entropy of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """Return the mean over all bytes."""
        return functional.cross_entropy(
            self.out(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten()
        )


def batch_of(text: Tensor, step: int, rank: int) -> Tensor:
    """Return the sequences of a rank in a step, from anywhere in the text."""
    random = torch.Generator().manual_seed(step * RANKS + rank)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def rate(step: int) -> float:
    """Return the share of the learning rate: a warmup, then half a cosine."""
    warm = min(1.0, (step + 1) / WARMUP)
    return warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / 1000)))


def fit(path: Path, folder: Path, steps: int) -> list[float]:
    """Train on this rank; returns the mean losses of all ranks."""
    rank, losses = distributed.get_rank(), list[float]()
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(0)  # equal on all ranks
    model = nn.Sequential(Embedding(), *(Block() for _ in range(LAYERS)), Head())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, rate)
    strategy = Strategy(
        parallel=Parallel(data=RANKS), zero=Zero(stage=3), train=Train(clip_norm=1.0)
    )
    first = batch_of(text, 0, rank)
    with Trainer(model, strategy, batch=first, optimizer=optimizer) as trainer:
        if (folder / ".metadata").exists():
            trainer.load(folder, {"scheduler": scheduler})
        for step in range(trainer.steps_done, steps):
            losses.append(trainer.average(trainer.step(batch_of(text, step, rank))))
            scheduler.step()
            if trainer.steps_done % EVERY == 0 or trainer.steps_done == steps:
                trainer.save(folder, {"scheduler": scheduler})
                if rank == 0:
                    norm, learning_rate = trainer.gradient_norm, scheduler.get_last_lr()[0]
                    print(
                        f"step {trainer.steps_done}: loss {losses[-1]:.3f}, "
                        f"gradient norm {norm:.2f}, next rate {learning_rate:.5f}"
                    )
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description="Train a small Llama on a text file.")
    parser.add_argument("text", type=Path, nargs="?", default=Path(__file__))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint"))
    asked = parser.parse_args(arguments)
    return run_ranks(fit, asked.text, asked.folder, asked.steps, ranks=RANKS)[0]


if __name__ == "__main__":
    main()
