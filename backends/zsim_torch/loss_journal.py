"""Write losses during a run to a file, so that a crash does not lose those of finished steps."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from zsim_torch.observe.watchers import unwatched

HEADER = "step,rank,loss\n"


def begin() -> Path:
    """Create a file in the temporary folder, to which ranks append lines.

    Raises:
        OSError: there is not enough space.
    """
    descriptor, name = tempfile.mkstemp(prefix="zsim-losses-", suffix=".csv")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(HEADER)
    return Path(name)


def add(journal: Path, *, step: int, rank: int, loss: float) -> None:
    """Append the loss of one step; ranks share the file, so a line is a single write.

    A full disk is ignored, since the losses are also in the result of the run.
    """
    with suppress(OSError):
        descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{step},{rank},{loss!r}\n".encode())
        finally:
            os.close(descriptor)


def kept(journal: Path) -> str:
    """Return a message with the path of a failed run's losses; delete a file that has none."""
    with suppress(OSError):
        lines = journal.read_text("utf-8").splitlines()[1:]
        steps = len({line.partition(",")[0] for line in lines})
        if steps:
            return f"losses of {steps} step{'s' if steps > 1 else ''} are in {journal}"
        journal.unlink()
    return ""


class StepLosses:
    """Losses of micro-batches by step, on their device until the end of the run.

    The first entry is that of setup.
    """

    def __init__(self, journal: Path | None, rank: int) -> None:
        self.steps: list[list[torch.Tensor | float]] = [[]]
        self._journal, self._rank = journal, rank
        self._noted = 0
        self._forgotten = 0

    def begin_step(self) -> None:
        """Start the next step, to which later losses belong."""
        self.note()
        self.steps.append([])

    def note(self) -> None:
        """Write the losses of finished steps to the journal, if there is one."""
        if self._journal is None:
            return
        late = any(isinstance(loss, torch.Tensor) for loss in self.steps[-1])
        while self._noted < self._forgotten + len(self.steps) - 1 - late:
            self._noted += 1
            if step := self.steps[self._noted - self._forgotten]:
                loss = _mean(step)
                add(self._journal, step=self._noted - 1, rank=self._rank, loss=loss)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch; on a GPU the host does not wait for it."""
        with unwatched():
            self.steps[-1].append(
                float(loss) if loss.device.type == "cpu" else loss.detach().clone()
            )

    def forget(self) -> None:
        """Forget all but the last two steps, of which one may not be in the journal yet."""
        self._forgotten += max(0, len(self.steps) - 2)
        self.steps = self.steps[-2:]

    def last(self) -> list[torch.Tensor | float]:
        """Return the losses of the micro-batches of the last step."""
        return self.steps[-1]

    def means(self) -> tuple[float, ...]:
        """Return the mean loss of each step that has losses."""
        return tuple(_mean(step) for step in self.steps[1:] if step)


def _mean(losses: Sequence[torch.Tensor | float]) -> float:
    return sum(float(loss) for loss in losses) / len(losses)
