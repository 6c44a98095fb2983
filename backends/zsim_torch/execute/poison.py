"""Make hidden faults visible: invalid memory is filled with NaN, and ranks are delayed.

A collective in flight works on copies. Its target holds NaN until an operation that is ordered
after it has waited, however fast the collective was, so a read without a wait shows. Its source and
target must not change in flight, since a GPU would not report that.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from zsim.schedule.operation import Broadcast, CollectiveOperation, ReducingOperation
from zsim_torch.execute.collectives import IssuedCollective
from zsim_torch.execute.memory_part import invalidate

DELAY_S_MAX: Final = 2e-3
"""Maximum delay of a rank at one operation; a collective on loopback takes about 1 ms."""

DELAYED_SHARE: Final = 0.1
"""Share of operations that are delayed."""

CYCLES_PER_S: Final = 1e9
"""Approximate cycles per second of a spinning GPU: the length of a delay is not exact."""


class PoisonError(RuntimeError):
    """Memory was used while it was invalid; the message names the operation."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class NanOrigin:
    """The first operation of a rank that wrote NaN: it read invalid memory, or computed NaN."""

    step: int
    place: int
    rank: int
    operation: str

    def __str__(self) -> str:
        where = self.operation if self.step < 0 else f"{self.operation} in step {self.step}"
        return f"rank {self.rank}, {where}"


@dataclass(slots=True)
class Poison:
    """Poison mode; a no-op without a generator."""

    generator: np.random.Generator | None = None

    @property
    def is_on(self) -> bool:
        """Return True if poison mode is on."""
        return self.generator is not None

    def delay(self) -> None:
        """Sleep for `late_s()` seconds."""
        late_s = self.late_s()
        if late_s:
            time.sleep(late_s)

    def late_s(self) -> float:
        """Return a random delay in seconds, mostly 0."""
        if self.generator is None or self.generator.random() >= DELAYED_SHARE:
            return 0.0
        return float(self.generator.uniform(0.0, DELAY_S_MAX))

    def veiled(self, handed: Iterable[IssuedCollective], place: int) -> "list[Veil]":
        """Wrap collectives to run on copies; this rank is member `place` of the communicator."""
        return [Veil(one, place, self.late_s()) for one in handed]


class Veil:
    """A collective that runs on copies: `handed` is issued, and `wait` reveals the result.

    An in-place collective keeps its own slot, which is its source and may be read in flight. On a
    GPU everything is in order on the current stream.
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
            invalidate(shown)
        if isinstance(self._operation, Broadcast) and not reads:
            source = shown  # this member sends nothing, so its source is never read
        self.handed = IssuedCollective(self._operation, source, shown)
        self._shown = shown
        self._cover(reads=reads)
        self._source_then = self._source.clone() if self._source is not None and reads else None
        self._target_then = None if self._target is None else self._target.clone()

    def _cover(self, *, reads: bool) -> None:
        """Fill the target with NaN, except for the part that is also the source."""
        source, target = self._source, self._target
        if target is None:
            return
        if source is None or not reads or not _alias(source, target):
            invalidate(target)
            return
        start = source.storage_offset() - target.storage_offset()
        operation = self._operation
        if isinstance(operation, CollectiveOperation) and operation.part == operation.source:
            invalidate(target[:start])
            invalidate(target[start + source.numel() :])
        elif isinstance(operation, ReducingOperation) and operation.part is None:
            invalidate(target)

    def wait(self) -> None:
        """Wait for the delay, then copy the result to the target.

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
    """Return True if one of the tensors contains NaN."""
    return any(tensor.is_floating_point() and bool(torch.isnan(tensor).any()) for tensor in tensors)
