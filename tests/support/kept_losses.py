"""Losses that a real run keeps in a file while it goes on."""

from pathlib import Path


def kept_losses(folder: Path) -> list[tuple[int, int, float]]:
    """Step, rank and loss of every line that was kept, after the header."""
    lines = [
        line
        for path in folder.glob("zsim-losses-*")
        for line in path.read_text("utf-8").splitlines()[1:]
    ]
    return [
        (int(step), int(rank), float(loss))
        for line in lines
        for step, rank, loss in [line.split(",")]
    ]
