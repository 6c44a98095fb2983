"""Save random generator states before a forward and restore them for its recomputation.

Covered are torch's generators, as in `torch.utils.checkpoint`, and Python's `random`. numpy's state
is not, because reading it takes as long as running a small layer.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zsim_torch.module.unit import TorchUnit, UnitRunError


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of torch's CPU generator, Python's, and the current CUDA device's if CUDA is in use.

    States that are None are not restored.
    """

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: tuple[Any, ...] | None = None

    @classmethod
    def now(cls) -> "RandomState":
        """Return the current states."""
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state() if used else None
        return cls(torch.get_rng_state(), cuda, random.getstate())

    @contextmanager
    def restored(self) -> Generator[None]:
        """Return a context manager that restores these states, and the outer ones at exit."""
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
        if self.python is not None:
            random.setstate(self.python)


@dataclass(frozen=True, slots=True)
class NumpyState:
    """State of the generator behind the functions of `numpy.random`."""

    name: str
    key: bytes
    rest: tuple[int, int, float]

    @classmethod
    def now(cls) -> "NumpyState":
        """Return the current state."""
        state: Any = np.random.get_state(legacy=True)  # noqa: NPY002  (modules draw from it)
        name, key, place, has_gauss, gauss = state
        return cls(str(name), key.tobytes(), (int(place), int(has_gauss), float(gauss)))

    def set(self) -> None:
        """Set the generator to this state."""
        state = (self.name, np.frombuffer(self.key, np.uint32), *self.rest)
        np.random.set_state(state)  # noqa: NPY002  (modules draw from it)


def drawn_so_far() -> tuple[object, ...]:
    """Return the states of all generators, for a later comparison."""
    found = RandomState.now()
    cuda = None if found.cuda is None else found.cuda.numpy().tobytes()
    return found.cpu.numpy().tobytes(), cuda, found.python, NumpyState.now()


@contextmanager
def need_repeatable(unit: TorchUnit) -> Generator[None]:
    """Raise UnitRunError if the forward inside the context draws numbers from numpy.

    A forward that is recomputed must draw the same numbers again.
    """
    before = NumpyState.now()
    yield
    if NumpyState.now() != before:
        raise UnitRunError(
            f"unit {unit.name}: its forward draws from numpy.random, and would draw other numbers "
            "where it is run again; draw from torch or Python's random, or turn checkpointing off "
            "for it"
        )
