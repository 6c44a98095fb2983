"""Makes hidden faults show: memory that is not valid holds no numbers, and ranks run late.

A collective works on copies while it flies: its target holds no number until an operation that is
ordered after it has waited, however fast the group was; whoever reads without waiting sees it. What
it reads and where it writes must not change meanwhile, as it would not be told on a GPU.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from zsim.schedule.operation import Broadcast, CollectiveOperation, ReducingOperation
from zsim_torch.execute.collectives import IssuedCollective
from zsim_torch.execute.memory_part import spoil

DELAY_S_MAX: Final = 2e-3
"""A late rank is at most this late at one operation; a collective on loopback takes about 1 ms."""

DELAYED_SHARE: Final = 0.1
"""Of all operations, how many are delayed."""

CYCLES_PER_S: Final = 1e9
"""Of a GPU that spins, about: what it waits for is time, not work."""


class PoisonError(RuntimeError):
    """Memory was used while it was not valid; the message names the operation."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sighting:
    """The first operation of a rank that wrote what is no number: it read some, or made it."""

    step: int
    place: int
    rank: int
    operation: str

    def __str__(self) -> str:
        where = self.operation if self.step < 0 else f"{self.operation} in step {self.step}"
        return f"rank {self.rank}, {where}"


@dataclass(slots=True)
class Poison:
    """Does nothing without a generator."""

    generator: np.random.Generator | None = None

    @property
    def is_on(self) -> bool:
        """Return whether anything is done."""
        return self.generator is not None

    def delay(self) -> None:
        """Now and then this rank is late."""
        late_s = self.late_s()
        if late_s:
            time.sleep(late_s)

    def late_s(self) -> float:
        """Return the seconds by which something is late, mostly none."""
        if self.generator is None or self.generator.random() >= DELAYED_SHARE:
            return 0.0
        return float(self.generator.uniform(0.0, DELAY_S_MAX))

    def veiled(self, handed: Iterable[IssuedCollective], place: int) -> "list[Veil]":
        """Return the collectives on copies; this rank is the member `place` of the communicator."""
        return [Veil(one, place, self.late_s()) for one in handed]


class Veil:
    """A collective that flies on copies: `handed` is given to the group, `wait` shows the result.

    An in-place one keeps its own slot, which is its source: that may be read meanwhile. On a GPU
    everything is in order on the stream that is current.
    """

    def __init__(self, handed: IssuedCollective, place: int, late_s: float) -> None:
        self._operation, self._source, self._target = handed
        self._late_s = late_s
        reads = self._source is not None and (
            not isinstance(self._operation, Broadcast) or self._operation.root == place
        )
        source = self._source.clone() if self._source is not None and reads else self._source
        shown = None if self._target is None else torch.empty_like(self._target)
        if shown is not None:
            spoil(shown)
        if isinstance(self._operation, Broadcast) and not reads:
            source = shown  # what this member would send is never read
        self.handed = IssuedCollective(self._operation, source, shown)
        self._shown = shown
        self._cover(reads=reads)
        self._source_then = self._source.clone() if self._source is not None and reads else None
        self._target_then = None if self._target is None else self._target.clone()

    def _cover(self, *, reads: bool) -> None:
        """Spoil the target, but for what is the source too and keeps its value."""
        source, target = self._source, self._target
        if target is None:
            return
        if source is None or not reads or not _alias(source, target):
            spoil(target)
            return
        start = source.storage_offset() - target.storage_offset()
        operation = self._operation
        if isinstance(operation, CollectiveOperation) and operation.part == operation.source:
            spoil(target[:start])
            spoil(target[start + source.numel() :])
        elif isinstance(operation, ReducingOperation) and operation.part is None:
            spoil(target)

    def wait(self) -> None:
        """Wait, then copy the result to the target.

        Raises:
            PoisonError: source or target changed in flight.
        """
        if self._late_s and self._on_gpu():
            torch.cuda._sleep(int(self._late_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
        for what, now, then in (
            ("reads", self._source, self._source_then),
            ("writes", self._target, self._target_then),
        ):
            if now is None or then is None:
                continue
            changed = _bytes(now).ne(_bytes(then)).any()
            if not self._on_gpu() and bool(changed):
                raise PoisonError(
                    f"{self._operation.id}: what it {what} changed while it was in flight: "
                    "written or freed too early"
                )
            if self._shown is not None and self._shown.is_floating_point():
                self._shown.masked_fill_(changed, float("nan"))
        if self._target is not None and self._shown is not None:
            self._target.copy_(self._shown)

    def _on_gpu(self) -> bool:
        return any(each is not None and each.is_cuda for each in (self._source, self._target))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def has_no_number(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of them holds something that is not a number."""
    return any(tensor.is_floating_point() and bool(torch.isnan(tensor).any()) for tensor in tensors)
