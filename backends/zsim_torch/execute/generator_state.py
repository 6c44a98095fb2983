"""The state of torch's generators, taken before a forward and given back for its recompute."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of the generator of the CPU and, with CUDA in use, of the current device's."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> "RandomState":
        """Return the current states."""
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state() if used else None
        return cls(torch.get_rng_state(), cuda)

    @contextmanager
    def restored(self) -> Generator[None]:
        """Inside, generators continue from these states; afterwards from where they were."""
        outside = RandomState.now()
        self.set()
        try:
            yield
        finally:
            outside.set()

    def set(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
